"""One decode token under a full every-step budget: the new row takes a dead slot, the oldest open row dies.

The incremental form of "keep the newest": no copy, no compaction, one slot written per layer. `SegmentStep` with the
same evidence is its oracle.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract import Phase, Transaction
from ..frame import LayerStep
from ..masks import MaskRecord
from ..storage import DenseRows, RowMap
from .inputs import ForwardInputs
from .snapshot import Snapshot
from .step import Step

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["RingStep"]


class RingStep(Step):
    """Position-only retention of one new row per batch row; one map serves all layers."""

    def __init__(
        self,
        runtime: Runtime,
        snapshot: Snapshot,
        inputs: ForwardInputs,
        transaction: Transaction,
        budget: tuple[int, ...],
    ) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        self.budget_rows = budget
        policy = self.runtime.composition
        self._pinned = policy.pinned_tokens if policy.positions == "cache_local" else ()
        base = snapshot.maps[0]
        self._slot_B, self.width_after = _choose_slot(base, len(self._pinned))
        self._pin_new_rows()
        self._candidate = self._with_candidate(base)
        self._view = self._candidate
        # One host number where one slot serves the whole batch: a plain copy instead of a scatter.
        uniform = inputs.batch == 1
        self._slot: int | None = int(self._slot_B) if uniform else None

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        keys, values = self.stored(keys_BHTD), self.stored(values_BHTD)
        limit = max(self.budget_rows) + 1 + len(self._pinned)
        rows = self.snapshot.rows[layer].grown(self.snapshot.width, self.width_after, limit=limit)
        if self._slot is not None:
            rows.write(self._slot, keys, values)
        else:
            if self.width_after > self.snapshot.width:
                # A slot that joins the rectangle must hold finite numbers in every batch row, dead or not.
                rows.write(self.snapshot.width, keys, values)
            rows.write_at(self._slot_B, keys, values)
        if self._newly_pinned:
            self._write_pristine(rows, keys)
        self.place_pinned(rows)
        self.rows[layer] = rows
        return rows.keys_BSCD[:, :, : self.width_after], rows.values_BSCD[:, :, : self.width_after]

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        if self.rows[layer] is not self.snapshot.rows[layer]:
            self.note_transient(0)
        self.transaction.enter_through(layer, Phase.PACK)

    def successor(self) -> Snapshot:
        counts = self.candidate_counts
        over = [count > budget for count, budget in zip(counts, self.budget_rows, strict=True)]
        frontier = self.inputs.frontier_after
        return replace(
            self.snapshot,
            generations=self.transaction.successor,
            frontier=frontier,
            rows=tuple(self.rows[i] for i in range(self.runtime.geometry.num_layers)),
            maps=(self._without_oldest(over) if any(over) else self._candidate,),
            counts=tuple(min(count, budget) for count, budget in zip(counts, self.budget_rows, strict=True)),
            last_was_segment=False,
            decision_epoch=self.snapshot.decision_epoch + 1,
            evicted_at_column=frontier.columns if any(over) else self.snapshot.evicted_at_column,
        )

    def _pin_new_rows(self) -> None:
        """Send a new row that is protected for ever to its reserved slot."""
        self._newly_pinned: list[tuple[int, int]] = []
        for row, token in enumerate(self.snapshot.frontier.tokens):
            if token in self._pinned and self.inputs.new_tokens[row]:
                self._newly_pinned.append((row, self._pinned.index(token)))
        for row, rank in self._newly_pinned:
            self._slot_B[row] = rank

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


def _choose_slot(base: RowMap, pinned: int) -> tuple[Tensor, int]:
    """Return a dead slot per batch row and the width afterwards; one slot more where a row has none."""
    dead = ~base.live_BMW[:, 0]
    dead[:, :pinned] = False
    if bool(dead.any(-1).all()):
        return dead.int().argmax(-1), base.width
    return torch.full((dead.shape[0],), base.width, dtype=torch.int64, device=dead.device), base.width + 1
