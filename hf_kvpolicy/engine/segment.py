"""A forward whose rows compete at once: a prompt segment, compressed layer by layer as attention returns."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract import Transaction
from ..frame import LayerStep
from ..masks import MaskRecord
from ..storage import stored_tensors
from .decide import Candidates, Decider, Observed
from .inputs import ForwardInputs
from .queries import held, hold_window
from .snapshot import Snapshot
from .step import Step
from .view import pristine_keys
from .visibility import SeenRows

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["SegmentStep"]


class SegmentStep(Step):
    """Attends over published and new rows, then keeps the best of both."""

    def __init__(
        self,
        runtime: Runtime,
        snapshot: Snapshot,
        inputs: ForwardInputs,
        transaction: Transaction,
        budget: tuple[int, ...],
    ) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        policy = self.runtime.composition
        self.budget_rows = budget
        after_all = self.is_dense and all(part.ordered for part in snapshot.maps)
        self.decider = Decider(
            policy,
            self.runtime.geometry,
            transaction,
            counts=self.candidate_counts,
            budget_rows=budget,
            newest_tokens=inputs.frontier_after.tokens,
            brought=inputs.brought,
            moves_keys=runtime.alibi is None,
            justified=after_all if snapshot.width else inputs.left_padded,
            ends_prompt=inputs.length > 1 or not snapshot.frontier.columns,
            merging=self.merging,
        )
        wanted = policy.evidence.window_queries if self.decider.drops_rows else 0
        self._window = hold_window(None, inputs, snapshot.frontier.columns, wanted) if wanted else None

    @property
    def drops_rows(self) -> bool:
        return self.decider.drops_rows

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        if not self.snapshot.width:
            return keys_BHTD, values_BHTD
        width = self.snapshot.width
        rows = self.snapshot.opened(layer, width, device=keys_BHTD.device)
        self.place_pinned(layer, rows)
        new_keys, new_values = self.stored(keys_BHTD), self.stored(values_BHTD)
        old_keys, old_values = rows.view(width)
        return torch.cat([old_keys, new_keys], dim=2), torch.cat([old_values, new_values], dim=2)

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        with stored_tensors():
            self._choose(layer, query_BQTD.detach(), step, record, scaling)

    def _choose(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        view = self.view_map(layer)
        keys, own = step.keys.detach(), self.snapshot.rows_of(layer)
        if self.snapshot.width and own is not None:
            keys = pristine_keys(own, keys)
        states, workspace_bytes = None, 0
        if self.carry is not None:
            states = self.carry.states(layer, query_BQTD, step.keys.detach(), view, self.visibility(record))
            workspace_bytes = self.carry.workspace_bytes(query_BQTD, states)
        candidates = Candidates(
            keys_BSND=keys, values_BSND=step.values.detach(), map=view, states_BSNX=states, stored=own
        )
        window = self._window
        queries = None if window is None else held(None, query_BQTD, window)
        columns = self.query_columns() if window is None else window.columns_BW
        visibility = self.visibility(record)
        observed = Observed(
            queries_BQWD=queries,
            real_BW=None if window is None else window.real_BW,
            visibility=SeenRows(visibility=visibility, view=view, columns_BW=columns),
            scaling=scaling,
            weighting=self.weighting,
        )
        self.decider.observe(layer, candidates, observed)
        self.rows = self.decider.rows
        layer_bytes = sum(t.numel() * t.element_size() for t in (candidates.keys_BSND, candidates.values_BSND))
        if self.decider.held_bytes:
            layer_bytes = self.decider.held_bytes
        self.note_transient(layer_bytes + max(workspace_bytes, self.decider.workspace_bytes))

    def successor(self) -> Snapshot:
        chosen = self.decider.finish(self.runtime.geometry.num_layers)
        frontier = self.inputs.frontier_after
        return replace(
            self.snapshot,
            generations=self.transaction.successor,
            frontier=frontier,
            **chosen,
            tail=None,
            counts=self.decider.kept_counts,
            tail_counts=(0,) * self.inputs.batch,
            budget_rows=self.budget_rows,
            scores_LBSWX=self.decider.stacked_states(),
            segment_tokens=self.snapshot.ended(frontier.tokens, self.inputs.brought)
            if self.decider.ends_prompt
            else self.snapshot.segment_tokens,
            open_segment=None,
            last_was_segment=self.inputs.length > 1,
            decision_epoch=self.snapshot.decision_epoch + 1,
            evicted_at_column=frontier.columns if self.decider.is_final else self.snapshot.evicted_at_column,
        )
