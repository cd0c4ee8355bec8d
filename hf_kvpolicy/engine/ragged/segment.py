"""A ragged forward whose rows compete at once: a prompt segment."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...backends import computes_like_blocks
from ...contract import Transaction
from ...frame import LayerStep
from ...masks import MaskRecord
from ...storage import stored_tensors
from ..inputs import ForwardInputs
from ..queries import hold_window, windowed
from ..snapshot import Snapshot
from .families import FamilyDecider
from .open_decider import open_decider
from .owners import OwnerQueries
from .selection import RaggedSelection

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["RaggedSegmentStep"]


class RaggedSegmentStep(RaggedSelection):
    """Scores, allocates and selects as its policy's axes say."""

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
        self.decider = open_decider(
            runtime,
            transaction,
            before=snapshot,
            frontier=inputs.frontier_after,
            candidates_LO=self.candidates_LO,
            budget_rows=budget,
            brought=inputs.brought,
            ends_prompt=inputs.length > 1 or not snapshot.frontier.columns,
        )
        wanted = runtime.composition.evidence.window_queries if self.decider.observes else 0
        self._window = hold_window(None, inputs, snapshot.frontier.columns, wanted) if wanted else None
        self._seen: dict[int, OwnerQueries] = {}
        self._profiler = self.decider if isinstance(self.decider, FamilyDecider) and inputs.length > 1 else None

    def _attention(
        self, backend: str, module: torch.nn.Module, query: Tensor, step: LayerStep, record: MaskRecord, kwargs: Any
    ) -> Tensor:
        """Attend as every forward does, or with the softmax that a profile takes where that does the same."""
        seen, profiler = self._queries(record, self.scaling), self._profiler
        tensors = (query, step.keys, step.values)
        if (
            seen is None
            or profiler is None
            or not profiler.may_attend
            or not computes_like_blocks(backend, tensors, kwargs)
        ):
            return super()._attention(backend, module, query, step, record, kwargs)
        assert self._window is not None, "queries that are seen are held"
        with stored_tensors():
            candidates = self.candidates(step.layer, step)
            return profiler.attend(step.layer, candidates, windowed(query, self._window), seen)

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        """Score, allocate, select and pack one layer (all of them after the last, where the allocation needs it)."""
        with stored_tensors():
            queries = None if self._window is None else windowed(query_BQTD.detach(), self._window)
            candidates = self.candidates(layer, step)
            self.decider.observe(layer, candidates, queries, self._queries(record, scaling))
            # Rows of a later prompt lie in buffers that are counted anyway.
            new = (step.keys, step.values) if not self.snapshot.frontier.columns else ()
            layer_bytes = sum(part.numel() * part.element_size() for part in new)
            if self.snapshot.frontier.columns:
                self.note_view(layer)
            self.note_transient(max(layer_bytes, self.decider.held_bytes) + self.decider.workspace_bytes)
            if not self.decider.held_bytes:
                self.buffers.pop(layer, None)

    def successor(self) -> Snapshot:
        """Return the snapshot in which every owner holds what was chosen for it."""
        layers = self.decider.finish(self.runtime.geometry.num_layers)
        return self.selected(layers, drops_rows=self.decider.drops_rows, **self.decider.decided())

    def fresh_buffers(self) -> list[Tensor]:
        """Return the tensors this forward made: packed layers, and grown buffers that still hold candidates."""
        packed = [tensor for layer, found in self.decider.layers.items() for tensor in self.made(layer, found.rows)]
        return packed + super().fresh_buffers()

    def _queries(self, record: MaskRecord, scaling: float) -> OwnerQueries | None:
        if self._window is None:
            return None
        if id(record) not in self._seen:
            self._seen[id(record)] = OwnerQueries(
                self._window,
                record,
                columns_after=self.inputs.frontier_after.columns,
                changed_mask_BF=self.inputs.changed_mask_BF,
                scaling=scaling,
                weighting=self.weighting,
                batch=self.inputs.batch,
                alibi=self.alibi,
            )
        seen = self._seen[id(record)]
        seen.scaling, seen.weighting = scaling, self.weighting
        return seen
