"""Rows' states during one forward: made, updated by the forward's queries, handed to the selection.

Letters: B batch rows, Q query heads, S stored heads, T queries, N attended rows, D head dimension, X state channels.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..evidence import CarriedEvidence, QueryBlock
from ..storage import RowMap, stored_tensors
from .evidence_blocks import attend_with_logits, observe_queries, query_clock, workspace_bytes
from .visibility import Visibility

if TYPE_CHECKING:
    from .step import Step

__all__ = ["Carry"]


class Carry:
    """What carried evidence needs from one forward."""

    def __init__(self, step: Step, evidence: CarriedEvidence) -> None:
        self.evidence = evidence
        # The step owns this object; a strong reference back would keep a forward's tensors until a collection runs.
        self._reference = weakref.ref(step)
        self._group = step.runtime.composition.group
        self._blocks: dict[int, QueryBlock] = {}
        self._tokens_BT: Tensor | None = None
        self._clock_BT: Tensor | None = None

    @property
    def _step(self) -> Step:
        step = self._reference()
        assert step is not None, "a forward that runs is held by its runtime"
        return step

    @property
    def is_prompt(self) -> bool:
        """Whether this forward is a prompt segment: several tokens, or the first ever."""
        return self._step.inputs.length > 1 or not self._step.snapshot.frontier.columns

    @property
    def query_tokens_BT(self) -> Tensor:
        """Token positions of this forward's queries."""
        if self._tokens_BT is None:
            self._tokens_BT = self._step.new_map().tokens_BMW[:, 0].long()
        return self._tokens_BT

    @property
    def clock_BT(self) -> Tensor:
        """The decode clock of this forward's queries."""
        if self._clock_BT is None:
            start = self._step.snapshot.segment_tokens
            self._clock_BT = query_clock(self.query_tokens_BT, start, self.is_prompt)
        return self._clock_BT

    def attend_one(
        self, layer: int, query_BQ1D: Tensor, keys_BSND: Tensor, values_BSND: Tensor, view: RowMap, mask: Tensor | None
    ) -> Tensor:
        """Attend with one decode query, keeping its logits: output and evidence share one softmax. [B, 1, Q, D]."""
        scaling = self._step.scaling
        output, logits, attention = attend_with_logits(query_BQ1D, keys_BSND, values_BSND, mask, scaling)
        with stored_tensors():
            block = QueryBlock(
                layer=layer,
                logits_BSGTN=logits.detach(),
                query_tokens_BT=self.query_tokens_BT,
                row_tokens_BMN=view.tokens_BMW,
                real_BT=self._step.inputs.real_BT,
                clock_BT=self.clock_BT,
                dtype=keys_BSND.dtype,
                computed_BSGTN=attention.detach(),
            )
        self._blocks[layer] = block
        return output

    def states(self, layer: int, keys_BSND: Tensor) -> Tensor:
        """Return a layer's states over the attended rows: published ones, then zeros for this forward's own rows."""
        batch, stored, rows, _ = keys_BSND.shape
        shape = (batch, stored, rows, self.evidence.channels)
        states = torch.zeros(shape, dtype=self.evidence.dtype, device=keys_BSND.device)
        old = self._step.snapshot.scores_LBSWX
        if old is not None:
            states[:, :, : old.shape[3]] = old[layer].to(states.device)
        return states

    def workspace_bytes(self, query_BQTD: Tensor, states_BSNX: Tensor) -> int:
        """Return the bytes alive at once while a layer's queries are observed, its states included."""
        states_bytes = states_BSNX.numel() * states_BSNX.element_size()
        return states_bytes + workspace_bytes(self.evidence, query_BQTD, states_BSNX.shape[2])

    def observe(
        self,
        layer: int,
        states_BSNX: Tensor,
        query_BQTD: Tensor,
        keys_BSND: Tensor,
        view: RowMap,
        visibility: Visibility,
        *,
        leaving: int = 0,
    ) -> None:
        """Add this forward's queries, but the last `leaving`, to the states, in place."""
        block = self._blocks.pop(layer, None)
        if block is not None and not leaving:
            self.evidence.observe_(states_BSNX, block, self._group)
            return
        observe_queries(
            self.evidence,
            self._group,
            states_BSNX,
            layer=layer,
            queries_BQTD=query_BQTD,
            columns_BT=self._step.query_columns(),
            query_tokens_BT=self.query_tokens_BT,
            real_BT=self._step.inputs.real_BT,
            clock_BT=self.clock_BT,
            keys_BSND=keys_BSND,
            view=view,
            visibility=visibility,
            scaling=self._step.scaling,
            stop=query_BQTD.shape[2] - leaving,
            # Where pads follow a row's tokens, its last queries are not the last columns.
            keep_all=not self._step.inputs.left_padded,
        )
