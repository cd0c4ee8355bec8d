"""A forward that drops nothing: rows go into spare slots behind the published ones.

Used by decode after a prompt selection, by the full cache, by held chunks and while past recording is on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..contract import Phase, Transaction
from ..frame import LayerStep
from ..masks import MaskRecord
from ..storage import DenseRows, RowMap, growth_slots, stored_tensors
from ..weighting import Weighting
from .inputs import ForwardInputs
from .queries import QueryWindow, held, hold_window
from .replacing import stored_fields
from .snapshot import OpenSegment, Snapshot
from .step import Step

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["AppendStep"]


class AppendStep(Step):
    """Appends rows to the tail; may keep a segment open whose selection comes later."""

    # Queries to hold for the selection that comes later; None when none will come.
    holds_queries: int | None = None
    _window: QueryWindow | None = None

    def __init__(self, runtime: Runtime, snapshot: Snapshot, inputs: ForwardInputs, transaction: Transaction) -> None:
        super().__init__(runtime, snapshot, inputs, transaction)
        self._states: dict[int, Tensor] = {}
        # Whether rows were coded in few bits, so that what was fed before cannot be taken back.
        self._coded_rows = False
        self._weights: dict[int, tuple[float, Weighting]] = {}

    def hold(self, queries: int) -> None:
        """Keep this segment open: hold its last queries (and the rule they see by) for a later selection."""
        self.holds_queries = queries
        self._queries: dict[int, Tensor] = {}
        before = self.snapshot.open_segment
        if queries:
            first = self.snapshot.frontier.columns
            self._window = hold_window(None if before is None else before.window, self.inputs, first, queries)
        self._segment = before

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        used, length = self.snapshot.width, self.inputs.length
        keys, values = self.stored(keys_BHTD), self.stored(values_BHTD)
        if self.merging is not None and layer in self.merging:
            self.merging.bring(layer, keys, values)
            if not used:
                return keys_BHTD, values_BHTD
            rows = self.snapshot.opened(layer, used + length, device=keys.device)
        else:
            rows = self.rows[layer] = self._buffers(layer, keys, values)
        self.place_pinned(layer, rows)
        rows.write(used, keys, values)
        return rows.view(used + length) if used else (keys_BHTD, values_BHTD)

    def attended(self, layer: int, query_BQTD: Tensor, step: LayerStep, record: MaskRecord, scaling: float) -> None:
        if self.carry is not None and not self.carry.holds_logits:
            with stored_tensors():
                view, visibility, keys = self.view_map(layer), self.visibility(record), step.keys.detach()
                self._states[layer] = self.carry.states(layer, query_BQTD.detach(), keys, view, visibility)
        if self.holds_queries is not None:
            before = self.snapshot.open_segment
            if self._window is not None:
                old = before.queries_BQWD[layer] if before is not None and before.queries_BQWD else None
                with stored_tensors():
                    self._queries[layer] = held(old, query_BQTD, self._window)
            if self._segment is None:
                start = self.snapshot.frontier.columns
                self._segment = OpenSegment(start_column=start, rule=record.rule_only())
            self._weights[layer] = (scaling, self.weighting)
        if self._codes_prompt:
            from .coded import code_layer  # not imported where rows stay as they are

            dense = self.rows[layer]
            with stored_tensors():
                live = self.view_map(layer).live_BMW
                self.rows[layer] = code_layer(self.runtime.composition, dense, self.width_after, live)
            self._coded_rows = self.rows[layer] is not dense
        if self.merging is not None and layer in self.merging:
            self.merging.attended(self, step, self.snapshot.width)
        elif self.is_new_buffer(layer):
            self.note_transient(0)
        self.note_view(layer)
        self.transaction.enter_through(layer, Phase.PACK)

    @property
    def _codes_prompt(self) -> bool:
        """Whether rows are coded layer by layer: of many that stay, those of all layers are a peak of their own."""
        stays = self.holds_queries is None and not self.runtime.recording
        policy = self.runtime.composition
        return policy.quantizes and policy.storage == "dense" and stays and self.inputs.length > 1

    @property
    def holds_rows(self) -> bool:
        return self.holds_queries is not None or super().holds_rows

    @property
    def waiting_queries(self) -> int:
        return min(self.inputs.length, self.holds_queries or 0)

    def _states_after(self) -> Tensor | None:
        """Return the states of all layers' rows; held queries count when they are accepted."""
        if self.carry is None:
            return self.snapshot.scores_LBSWX
        if self._states:
            return torch.stack([self._states[i].to(self.inputs.device) for i in range(len(self._states))])
        old = self.snapshot.scores_LBSWX
        assert old is not None, "rows that were appended before carry states"
        states = torch.cat([old, torch.zeros_like(old[:, :, :, : self.inputs.length])], dim=3)
        self.note_transient(self.carry.held_bytes)
        if not self.waiting_queries:
            self.carry.add_held_(states, self._row_tokens())
        return states

    def _row_tokens(self) -> Tensor:
        """Return the token positions of the attended rows; one layer where all share them."""
        maps = self.snapshot.maps
        parts = [torch.stack([part.tokens_BMW for part in maps])]
        for shared in (self.snapshot.tail, self.new_map()):
            if shared is not None:
                parts.append(shared.tokens_BMW.expand(len(maps), -1, parts[0].shape[2], -1))
        return torch.cat(parts, dim=3)

    def successor(self) -> Snapshot:
        old, layers = self.snapshot, self.runtime.geometry.num_layers
        new = self.new_map()
        tail = new if old.tail is None else old.tail.then(new)
        segment = old.open_segment
        if self.holds_queries is not None and self._segment is not None:
            queries = tuple(self._queries[i] for i in range(layers)) if self._window is not None else ()
            # Where the held queries came from is of no use later, and would keep a larger tensor alive.
            window = None if self._window is None else replace(self._window, index_BW=None)
            scalings, weightings = zip(*(self._weights[i] for i in range(layers)), strict=True)
            segment = replace(
                self._segment, queries_BQWD=queries, window=window, scalings=scalings, weightings=weightings
            )
        # What is held, or waits, ends when it is chosen from.
        ends_prompt = self.inputs.length > 1 and not self.runtime.recording and self.holds_queries is None
        tail_before = old.tail_counts or (0,) * self.inputs.batch
        return replace(
            old,
            generations=self.transaction.successor,
            frontier=self.inputs.frontier_after,
            **self.placed(),
            tail=tail,
            tail_counts=tuple(a + b for a, b in zip(tail_before, self.inputs.new_tokens, strict=True)),
            scores_LBSWX=self._states_after(),
            segment_tokens=old.ended(self.inputs.frontier_after.tokens, self.inputs.brought)
            if ends_prompt
            else old.segment_tokens,
            open_segment=segment,
            last_was_segment=self.inputs.length > 1,
            evicted_at_column=self.inputs.frontier_after.columns if self._coded_rows else old.evicted_at_column,
        )

    def placed(self) -> dict[str, Any]:
        """Return where rows lie now, as the fields of a snapshot."""
        return {
            **stored_fields(self.merging, self.rows),
            "maps": self.snapshot.maps or (RowMap.empty(self.inputs.batch, self.inputs.device),),
            "counts": self.candidate_counts,
        }

    def is_new_buffer(self, layer: int) -> bool:
        """Whether a layer's buffers were made by this forward."""
        return self.rows[layer] is not self.snapshot.rows_of(layer)

    def _buffers(self, layer: int, keys: Tensor, values: Tensor) -> DenseRows:
        published, length = self.snapshot.rows_of(layer), self.inputs.length
        if published is None:
            return DenseRows.allocate(keys, values, growth_slots(length))
        return published.grown(self.snapshot.width, self.snapshot.width + length)
