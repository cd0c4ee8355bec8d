"""One decode token under a full every-step budget: the new row takes a dead slot, the oldest open row dies.

The incremental form of "keep the newest": no copy, no compaction, one slot written per layer. `SegmentStep` with the
same evidence is its oracle.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract import Transaction
from ..storage import DenseRows, RowMap
from .inputs import ForwardInputs
from .one_token import OneTokenStep
from .snapshot import Snapshot

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["RingStep"]


class RingStep(OneTokenStep):
    """Position-only retention of one new row per batch row; one map serves all layers."""

    def __init__(
        self,
        runtime: Runtime,
        snapshot: Snapshot,
        inputs: ForwardInputs,
        transaction: Transaction,
        budget: tuple[int, ...],
    ) -> None:
        super().__init__(runtime, snapshot, inputs, transaction, budget)
        policy = self.runtime.composition
        self._pinned = policy.pinned_tokens if policy.positions == "cache_local" else ()
        # Where older rows are coded, new ones lie behind all others until it is their turn.
        self._limit = None if policy.quantizes else max(budget) + 1 + len(self._pinned)
        base = snapshot.maps[0]
        self._newly_pinned = self._pins_among_new()
        self._slot_B, self.width_after = _choose_slot(
            base, snapshot.counts, len(self._pinned), self._newly_pinned, behind=policy.quantizes
        )
        self._candidate = self._with_candidate(base)
        self._view = self._candidate
        # One host number where one slot serves the whole batch: a plain copy instead of a scatter.
        uniform = inputs.batch == 1
        self._slot: int | None = int(self._slot_B) if uniform else None

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.stored(keys_BHTD), self.stored(values_BHTD)
        rows = self.snapshot.opened(layer, self.width_after, self._limit, device=keys.device)
        if self.merging is not None and layer in self.merging:
            self.merging.bring(layer, keys, values)
        self.place_pinned(layer, rows)
        joins = self.width_after > self.snapshot.width
        if joins:
            # A slot that joins the rectangle must hold finite numbers in every batch row, dead or not: the new row may
            # go to a pinned slot instead.
            rows.write(self.snapshot.width, keys, values)
        if self._slot is None:
            rows.write_at(self._slot_B, keys, values)
        elif not joins or self._slot != self.snapshot.width:
            rows.write(self._slot, keys, values)
        if self._newly_pinned and self.runtime.alibi is None:
            self._write_pristine(rows, keys)
        self.rows[layer] = rows
        return rows.view(self.width_after)

    def slot_of(self, layer: int) -> Tensor:
        return self._slot_B[:, None]

    def maps_after(self, over: list[bool]) -> tuple[RowMap, ...]:
        return (self._without_oldest(over) if any(over) else self._candidate,)

    def _pins_among_new(self) -> list[tuple[int, int]]:
        """Return (batch row, reserved slot) of new rows that are protected for ever."""
        return [
            (row, self._pinned.index(token))
            for row, token in enumerate(self.snapshot.frontier.tokens)
            if token in self._pinned and self.inputs.new_tokens[row]
        ]

    def _write_pristine(self, rows: DenseRows, keys_BS1D: Tensor) -> None:
        assert rows.pinned_keys_BSPD is not None
        for row, rank in self._newly_pinned:
            rows.pinned_keys_BSPD[row, :, rank] = keys_BS1D[row, :, 0]

    def _with_candidate(self, base: RowMap) -> RowMap:
        new = self.new_map()
        slot = self._slot_B.view(-1, 1, 1)
        parts = []
        for old, fresh in (
            (base.columns_BMW, new.columns_BMW),
            (base.tokens_BMW, new.tokens_BMW),
            (base.live_BMW, new.live_BMW),
        ):
            if self.width_after > base.width:
                old = torch.cat([old, torch.zeros_like(fresh)], dim=2)
            parts.append(old.scatter(2, slot, fresh))
        columns, tokens, live = parts
        return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live, ordered=False)

    def _without_oldest(self, over: list[bool]) -> RowMap:
        policy, table = self.runtime.composition, self._candidate
        tokens = table.tokens_BMW
        open_rows = table.live_BMW
        if policy.sinks:
            open_rows = open_rows & (tokens >= policy.sinks)
        if policy.protect:
            open_rows = open_rows & ~torch.isin(tokens, torch.tensor(policy.protect, device=tokens.device))
        oldest = torch.where(open_rows, tokens, torch.iinfo(tokens.dtype).max).argmin(-1, keepdim=True)
        if all(over):
            live = table.live_BMW.scatter(2, oldest, False)
        else:
            stays = ~torch.tensor(over, device=tokens.device).view(-1, 1, 1)
            live = table.live_BMW.scatter(2, oldest, table.live_BMW.gather(2, oldest) & stays)
        return RowMap(columns_BMW=table.columns_BMW, tokens_BMW=tokens, live_BMW=live, ordered=False)


def _choose_slot(
    base: RowMap, counts: Sequence[int], pinned: int, reserved: list[tuple[int, int]], *, behind: bool
) -> tuple[Tensor, int]:
    """Return a dead slot per batch row (its reserved one where it has one) and the width afterwards.

    The width grows by one slot where a row has no dead one (`behind`: or must not take it); rows with a reserved slot
    need none.
    """
    dead = ~base.live_BMW[:, 0] if not behind else torch.zeros_like(base.live_BMW[:, 0])
    if not behind and not pinned and all(count < base.width for count in counts):
        return dead.int().argmax(-1), base.width
    dead[:, :pinned] = False
    for row, slot in reserved:
        dead[row] = False
        dead[row, slot] = True
    if bool(dead.any(-1).all()):
        return dead.int().argmax(-1), base.width
    slots = torch.full((dead.shape[0],), base.width, dtype=torch.int64, device=dead.device)
    for row, slot in reserved:
        slots[row] = slot
    return slots, base.width + 1
