"""Rows' states during one forward: made, updated by the forward's queries, handed to the selection.

A prompt's queries are added layer by layer. One decode token's logits are held until the last layer, so that all layers
are updated at once: the cost does not grow with Python calls per layer.

Letters: L layers, B batch rows, Q query heads, S stored heads, G query heads of one, T queries, N attended rows, M map
heads, D head dimension, X state channels.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..backends import computes_like_blocks
from ..evidence import CarriedEvidence, QueryBlock
from ..storage import RowMap, stored_tensors
from .evidence_blocks import (
    SegmentQueries,
    attend_queries,
    attend_with_logits,
    layers_at_once,
    observe_queries,
    query_clock,
    sinks_of,
    workspace_bytes,
)
from .shared_evidence import evidence_once
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
        self._logits: dict[int, Tensor] = {}
        self._sinks: dict[int, Tensor | None] = {}
        self._attended: dict[int, Tensor] = {}
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

    @property
    def holds_logits(self) -> bool:
        """Whether a decode token's logits wait to be added, in all layers at once."""
        return bool(self._logits)

    @property
    def held_bytes(self) -> int:
        """Bytes of the logits that wait."""
        return sum(logits.numel() * logits.element_size() for logits in self._logits.values())

    def attend_one(
        self,
        layer: int,
        query_BQ1D: Tensor,
        keys_BSND: Tensor,
        values_BSND: Tensor,
        mask_BMTN: Tensor | None,
        *,
        dropout: float = 0.0,
    ) -> Tensor:
        """Attend with one decode query, holding its logits. [B, 1, Q, D]."""
        step = self._step
        output, logits, _ = attend_with_logits(
            query_BQ1D, keys_BSND, values_BSND, mask_BMTN, step.scaling, step.weighting, dropout=dropout
        )
        self._logits[layer] = logits.detach()
        self._sinks[layer] = sinks_of(step.weighting, keys_BSND.shape[1])
        return output

    def shares_softmax(
        self, backend: str, query_BQTD: Tensor, keys_BSND: Tensor, values_BSND: Tensor, arguments: dict[str, Any]
    ) -> bool:
        """Whether a prompt's output may come from the softmax that evidence takes.

        Evidence must read every query, and rows be dropped: a prompt that is kept whole equals the stock cache's.
        """
        if self.evidence.last_queries is not None or not self._step.drops_rows or query_BQTD.shape[2] == 1:
            return False
        return computes_like_blocks(backend, (query_BQTD, keys_BSND, values_BSND), arguments)

    def attend_prompt(
        self,
        layer: int,
        query_BQTD: Tensor,
        keys_BSND: Tensor,
        values_BSND: Tensor,
        view: RowMap,
        visibility: Visibility,
    ) -> Tensor:
        """Attend with a prompt's queries and add them to the states at once. [B, T, Q, D]."""
        with stored_tensors():
            states = self._fresh(layer, keys_BSND)
            queries = self._queries(layer, query_BQTD, keys_BSND, view, visibility)
            output = attend_queries(self.evidence, self._group, states, queries, values_BSND)
            self._attended[layer] = states
        return output

    def states(self, layer: int, query_BQTD: Tensor, keys_BSND: Tensor, view: RowMap, visibility: Visibility) -> Tensor:
        """Return a layer's states over the attended rows with this forward's queries, but the waiting ones, added."""
        attended = self._attended.pop(layer, None)
        if attended is not None:
            return attended
        where = ("states", layer, self._group, keys_BSND.shape[1])
        return evidence_once(
            self.evidence, where, lambda: self._observed(layer, query_BQTD, keys_BSND, view, visibility)
        )

    def _observed(
        self, layer: int, query_BQTD: Tensor, keys_BSND: Tensor, view: RowMap, visibility: Visibility
    ) -> Tensor:
        states = self._fresh(layer, keys_BSND)
        logits, end = self._logits.pop(layer, None), query_BQTD.shape[2] - self._step.waiting_queries
        if logits is not None and end:
            self.evidence.observe_(states, self._block(layer, logits, view.tokens_BMW, self._sinks[layer]), self._group)
        elif end:
            # Where pads follow a row's tokens, its last queries are not the last columns.
            keep_all = not self._step.inputs.left_padded
            queries = self._queries(layer, query_BQTD, keys_BSND, view, visibility)
            observe_queries(self.evidence, self._group, states, queries, stop=end, keep_all=keep_all)
        return states

    def add_held_(self, states_LBSNX: Tensor, tokens_LBMN: Tensor) -> None:
        """Add a decode token's held logits to the states of all layers, in place. `tokens`: L or 1 where all share."""
        held = [self._logits.pop(layer) for layer in range(len(self._logits))]
        tokens = tokens_LBMN.expand(len(held), -1, -1, -1)
        width = layers_at_once(held[0])
        for start in range(0, len(held), width):
            part = slice(start, start + width)
            logits = torch.stack([one.to(states_LBSNX.device) for one in held[part]])
            layers, batch = logits.shape[:2]
            layer_B = torch.arange(start, start + layers, device=logits.device).repeat_interleave(batch)
            sinks = [self._sinks[layer] for layer in range(start, start + layers)]
            sinks = [None if own is None else own.to(logits.device) for own in sinks]
            block = self._block(
                layer_B, logits.flatten(0, 1), tokens[part].flatten(0, 1), _of_batches(sinks, batch), repeats=layers
            )
            self.evidence.observe_(states_LBSNX[part].view(-1, *states_LBSNX.shape[2:]), block, self._group)

    def workspace_bytes(self, query_BQTD: Tensor, states_BSNX: Tensor) -> int:
        """Return the bytes alive at once while a layer's queries are observed, its states included."""
        states_bytes = states_BSNX.numel() * states_BSNX.element_size()
        return states_bytes + workspace_bytes(self.evidence, query_BQTD, states_BSNX.shape[2])

    def _fresh(self, layer: int, keys_BSND: Tensor) -> Tensor:
        """Return a layer's states over the attended rows: published ones, then zeros for this forward's own rows."""
        batch, stored, rows, _ = keys_BSND.shape
        shape = (batch, stored, rows, self.evidence.channels)
        states = torch.zeros(shape, dtype=self.evidence.dtype, device=keys_BSND.device)
        old = self._step.snapshot.scores_LBSWX
        if old is not None:
            states[:, :, : old.shape[3]] = old[layer].to(states.device)
        return states

    def _block(
        self,
        layer: int | Tensor,
        logits_BSGTN: Tensor,
        tokens_BMN: Tensor,
        sinks_BSG: Tensor | None,
        *,
        repeats: int = 1,
    ) -> QueryBlock:
        """Return this forward's one query as a block; `repeats` layers may be folded into the batch."""
        real, device, dtype = self._step.inputs.real_BT, logits_BSGTN.device, self._step.snapshot.dtype
        assert dtype is not None, "one token is observed among rows that were published"
        return QueryBlock(
            layer=layer,
            logits_BSGTN=logits_BSGTN,
            query_tokens_BT=self.query_tokens_BT.repeat(repeats, 1).to(device),
            row_tokens_BMN=tokens_BMN.to(device),
            real_BT=None if real is None else real.repeat(repeats, 1).to(device),
            clock_BT=self.clock_BT.repeat(repeats, 1).to(device),
            dtype=dtype,
            sinks_BSG=sinks_BSG,
        )

    def _queries(
        self, layer: int, query_BQTD: Tensor, keys_BSND: Tensor, view: RowMap, visibility: Visibility
    ) -> SegmentQueries:
        return SegmentQueries(
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
            weighting=self._step.weighting,
        )


def _of_batches(sinks_1SG: list[Tensor | None], batch: int) -> Tensor | None:
    """Return the sinks of some layers for layers that are folded into the batch, [L * B, S, G]."""
    found = [sinks for sinks in sinks_1SG if sinks is not None]
    return torch.cat(found).repeat_interleave(batch, dim=0) if found else None
