"""One decode token under an every-step budget with carried scores: a dead slot is filled, the weakest open row dies.

Slots differ by layer, head and batch row, so maps and states of all layers are stacked and decided at once after the
last layer: the cost of a decision does not grow with Python calls per layer.

Letters: L layers (1 where all share one map), B batch rows, M map heads, S stored heads, W slots, X state channels.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract import Transaction
from ..selection import reduce_layers
from ..storage import RowMap
from .decide import check_finite
from .inputs import ForwardInputs
from .one_token import OneTokenStep
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["EvictStep"]


class EvictStep(OneTokenStep):
    """Scored retention of one new row per batch row."""

    def __init__(
        self,
        runtime: Runtime,
        snapshot: Snapshot,
        inputs: ForwardInputs,
        transaction: Transaction,
        budget: tuple[int, ...],
    ) -> None:
        super().__init__(runtime, snapshot, inputs, transaction, budget)
        # A selection that dropped nothing leaves maps that heads share; from now on each owner may lose another row.
        layers = 1 if runtime.composition.unit == "token" else runtime.geometry.num_layers
        heads = 1 if runtime.composition.heads_share else runtime.geometry.num_kv_heads
        shape = (layers, inputs.batch, heads, snapshot.width)
        self._columns_LBMW, self._tokens_LBMW, self._live_LBMW = (
            torch.stack([getattr(part, name) for part in snapshot.maps]).expand(shape)
            for name in ("columns_BMW", "tokens_BMW", "live_BMW")
        )
        self._place()
        self.candidate_maps = self._maps(self._live_LBMW)

    def view_map(self, layer: int) -> RowMap:
        """Return the map of a layer's slots with the new row in place."""
        return self.candidate_maps[layer if len(self.candidate_maps) > 1 else 0]

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        limit = None if self.runtime.composition.quantizes else max(*self.budget_rows, self.width_after - 1) + 1
        rows = self.snapshot.opened(layer, self.width_after, limit, device=keys_BHTD.device)
        if self.merging is not None and layer in self.merging:
            self.merging.bring(layer, keys_BHTD, values_BHTD)
        if self.width_after > self.snapshot.width:
            rows.write(self.snapshot.width, keys_BHTD, values_BHTD)
        else:
            slot_BM = self.slot_of(layer).to(keys_BHTD.device)
            index = slot_BM[:, :, None, None].expand(-1, keys_BHTD.shape[1], 1, -1)
            rows.keys_BSCD.scatter_(2, index.expand(-1, -1, -1, keys_BHTD.shape[3]), keys_BHTD)
            rows.values_BSCD.scatter_(2, index.expand(-1, -1, -1, values_BHTD.shape[3]), values_BHTD)
        self.rows[layer] = rows
        return rows.view(self.width_after)

    def slot_of(self, layer: int) -> Tensor:
        return self._slot_LBM[layer if self._slot_LBM.shape[0] > 1 else 0]

    def successor(self) -> Snapshot:
        assert self.carry is not None, "only carried evidence is decided this way"
        self.note_transient(self.carry.held_bytes)
        self.carry.add_held_(self._states_LBSWX, self._tokens_LBMW)
        return super().successor()

    def maps_after(self, over: list[bool]) -> tuple[RowMap, ...]:
        return self._maps(self._without_weakest(over)) if any(over) else self.candidate_maps

    def states_after(self) -> Tensor:
        return self._states_LBSWX

    def _place(self) -> None:
        """Choose a dead slot per owner (one slot more where none is dead) and put the new row's numbers there."""
        width, new = self.snapshot.width, self.new_map()
        fresh = (new.columns_BMW, new.tokens_BMW, new.live_BMW)
        states = self.snapshot.scores_LBSWX
        assert states is not None
        # Where older rows are coded, new ones lie behind all others until it is their turn.
        behind = self.runtime.composition.quantizes
        if not behind and all(count < width for count in self.snapshot.counts):
            self.width_after = width
            self._slot_LBM = (~self._live_LBMW).int().argmax(-1)
            index = self._slot_LBM[..., None]
            parts = (self._columns_LBMW, self._tokens_LBMW, self._live_LBMW)
            self._columns_LBMW, self._tokens_LBMW, self._live_LBMW = (
                part.scatter(3, index, value.expand(index.shape)) for part, value in zip(parts, fresh, strict=True)
            )
            slots = self._slot_LBM.expand(states.shape[0], -1, states.shape[2])
            empty = slots[..., None, None].expand(-1, -1, -1, 1, states.shape[4])
            self._states_LBSWX = states.scatter(3, empty, 0)
            return
        shape = (*self._live_LBMW.shape[:3], 1)
        self._columns_LBMW, self._tokens_LBMW, self._live_LBMW = (
            torch.cat([part, value.expand(shape)], dim=3)
            for part, value in zip((self._columns_LBMW, self._tokens_LBMW, self._live_LBMW), fresh, strict=True)
        )
        self._states_LBSWX = torch.cat([states, torch.zeros_like(states[:, :, :, :1])], dim=3)

    def _maps(self, live_LBMW: Tensor) -> tuple[RowMap, ...]:
        parts = zip(self._columns_LBMW.unbind(), self._tokens_LBMW.unbind(), live_LBMW.unbind(), strict=True)
        return tuple(RowMap(columns_BMW=c, tokens_BMW=t, live_BMW=live, ordered=False) for c, t, live in parts)

    def _without_weakest(self, over: list[bool]) -> Tensor:
        """Return the live flags after the weakest open row of every owner over its budget is dropped."""
        policy, tokens, live = self.runtime.composition, self._tokens_LBMW, self._live_LBMW
        device = tokens.device
        assert self.carry is not None, "only carried evidence is decided this way"
        evidence = self.carry.evidence
        scores = evidence.scores(self._states_LBSWX, tokens)
        if policy.heads_share:
            scores = scores.sum(dim=2, keepdim=True)
        scores = reduce_layers(scores, policy.unit, policy.pairs)
        check_finite([torch.isfinite(scores.masked_fill(~live, 0.0)).all()])
        windows = [policy.window_for(budget) for budget in self.budget_rows]
        first_recent = torch.tensor(
            [t - w for t, w in zip(self.inputs.frontier_after.tokens, windows, strict=True)], device=device
        )
        open_rows = live & (tokens < first_recent.view(1, -1, 1, 1))
        if policy.protect:
            open_rows &= ~torch.isin(tokens, torch.tensor(policy.protect, device=device))
        ranked = torch.where(open_rows, scores, torch.inf)
        weakest = ranked == ranked.amin(-1, keepdim=True)
        # The lower position stays among equals (or the higher one, where the method says so).
        side = -tokens if evidence.keeps_newest_on_ties else tokens
        victim = torch.where(weakest & open_rows, side, torch.iinfo(tokens.dtype).min).argmax(-1, keepdim=True)
        if all(over):
            return live.scatter(3, victim, False)
        stays = ~torch.tensor(over, device=device).view(1, -1, 1, 1)
        return live.scatter(3, victim, live.gather(3, victim) & stays)
