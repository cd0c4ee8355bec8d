"""A selection over ragged rows that were appended first: held chunks, accepted drafts."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...contract import Phase, Transaction
from ...positions import alibi_in
from ...storage import RaggedLayer, RowMap
from ...weighting import PLAIN
from ..queries import windowed
from ..snapshot import Snapshot
from .open_decider import open_decider
from .owners import LiveTail, OwnerCandidates, OwnerQueries

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["decide_appended_ragged", "laid_behind_ragged"]


def decide_appended_ragged(
    runtime: Runtime, snapshot: Snapshot, transaction: Transaction, budget_rows: tuple[int, ...], *, ends_prompt: bool
) -> Snapshot:
    """Return the successor of a snapshot whose rows now compete; see `engine.deferred.decide_appended`."""
    layers, heads, brought = runtime.geometry.num_layers, snapshot.ragged[0].map.heads, snapshot.brought
    tail = LiveTail(RowMap.empty(snapshot.batch_size, snapshot.device) if snapshot.tail is None else snapshot.tail)
    decider = open_decider(
        runtime,
        transaction,
        before=snapshot,
        frontier=snapshot.frontier,
        candidates_LO=[list(chain(*snapshot.owner_rows(layer, heads))) for layer in range(layers)],
        budget_rows=budget_rows,
        brought=brought,
        ends_prompt=ends_prompt,
    )
    segment, wanted = snapshot.open_segment, runtime.composition.evidence.window_queries
    window = seen = None
    if decider.observes and wanted and segment is not None and segment.window is not None:
        window = segment.window.last(wanted)
        seen = OwnerQueries(
            window,
            segment.rule,
            columns_after=snapshot.frontier.columns,
            changed_mask_BF=None,
            scaling=1.0,
            weighting=PLAIN,
            batch=snapshot.batch_size,
            alibi=alibi_in(runtime.alibi, snapshot.dtype),
        )
    for layer in range(layers):
        transaction.enter_through(layer, Phase.ATTEND)
        queries = None
        if window is not None and segment is not None and seen is not None:
            queries = windowed(segment.queries_BQWD[layer], window)
            seen.scaling, seen.weighting = segment.scalings[layer], segment.weightings[layer]
        decider.observe(layer, _candidates(snapshot, layer, tail), queries, seen)
    return replace(
        snapshot,
        generations=transaction.successor,
        ragged=decider.finish(layers),
        **decider.decided(),
        tail=None,
        tail_counts=(0,) * snapshot.batch_size,
        budget_rows=budget_rows,
        segment_tokens=snapshot.ended(snapshot.frontier.tokens, brought) if ends_prompt else snapshot.segment_tokens,
        open_segment=None,
        decision_epoch=snapshot.decision_epoch + 1,
        evicted_at_column=snapshot.frontier.columns if decider.drops_rows else snapshot.evicted_at_column,
    )


def laid_behind_ragged(chosen: Snapshot, waiting: Snapshot, length: int) -> Snapshot:
    """Return a waiting snapshot whose last `length` columns follow the rows that were chosen; see `laid_behind`."""
    assert waiting.tail is not None, "what waits was appended"
    used, layers = waiting.tail_width - length, []
    for kept, fed in zip(chosen.ragged, waiting.ragged, strict=True):
        base, shape = fed.map.lengths, (chosen.batch_size, kept.map.heads, length, -1)
        parts = [fed.rows.owner(owner, rows + used + length) for owner, rows in enumerate(base)]
        keys, values = (torch.cat([part[which][-length:] for part in parts]).view(shape) for which in (0, 1))
        larger = kept.rows.grown(kept.map.lengths, [rows + length for rows in kept.map.lengths])
        larger.write(kept.map.lengths_O, 0, keys, values)
        layers.append(RaggedLayer(rows=larger, map=kept.map))
    new = waiting.tail.last(length)
    return replace(
        chosen,
        frontier=waiting.frontier,
        foreign=waiting.foreign,
        ragged=tuple(layers),
        tail=new,
        tail_counts=tuple(new.live_BMW[:, 0].sum(-1).tolist()),
        open_segment=waiting.open_segment,
        last_was_segment=waiting.last_was_segment,
    )


def _candidates(snapshot: Snapshot, layer: int, tail: LiveTail) -> OwnerCandidates:
    rows, base = snapshot.ragged[layer].rows, snapshot.ragged[layer].map

    def slots(owner: int) -> tuple[Tensor, Tensor]:
        return rows.owner(owner, base.lengths[owner] + tail.width)

    return OwnerCandidates(slots=slots, base=base, tail=tail, stored=rows)
