"""What ring and evict share: one decode token under a budget that holds after every step."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from ..contract import Phase, Transaction
from ..frame import LayerStep
from ..masks import MaskRecord
from ..storage import RowMap
from .inputs import ForwardInputs
from .replacing import stored_fields
from .snapshot import Snapshot
from .step import Step

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["OneTokenStep"]


class OneTokenStep(Step):
    """The new row goes into a dead slot; where a batch row is over its budget, one open row of each owner dies."""

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

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        """Nothing is packed: the row already lies in its slot."""
        if self.merging is not None and layer in self.merging:
            # The row's slot is one of the restored copy as well, which is of no more use.
            del self.rows[layer]
            joins = self.width_after > self.snapshot.width
            slots = self.snapshot.width if joins else self.slot_of(layer)
            self.merging.attended(self, step, slots, limit=max(self.width_after, max(self.budget_rows) + 1))
        elif self.rows[layer] is not self.snapshot.rows_of(layer):
            self.note_transient(0)
        self.note_view(layer)
        self.transaction.enter_through(layer, Phase.PACK)

    @abstractmethod
    def slot_of(self, layer: int) -> Tensor:
        """Return the dead slot that a layer's new row takes, [B, M], where none is added."""

    @abstractmethod
    def maps_after(self, over: list[bool]) -> tuple[RowMap, ...]:
        """Return the maps to publish; `over` tells which batch rows hold more than their budget."""

    def states_after(self) -> Tensor | None:
        """Return the states that rows carry, if they carry any."""
        return self.snapshot.scores_LBSWX

    def successor(self) -> Snapshot:
        """Return the snapshot with one row more and, over the budget, one row less per owner."""
        counts = self.candidate_counts
        over = [count > budget for count, budget in zip(counts, self.budget_rows, strict=True)]
        frontier = self.inputs.frontier_after
        successor = replace(
            self.snapshot,
            generations=self.transaction.successor,
            frontier=frontier,
            **stored_fields(self.merging, self.rows),
            maps=self.maps_after(over),
            scores_LBSWX=self.states_after(),
            counts=tuple(min(count, budget) for count, budget in zip(counts, self.budget_rows, strict=True)),
            last_was_segment=False,
            decision_epoch=self.snapshot.decision_epoch + 1,
            evicted_at_column=frontier.columns if any(over) else self.snapshot.evicted_at_column,
        )
        return successor.without_dead_exceptions()
