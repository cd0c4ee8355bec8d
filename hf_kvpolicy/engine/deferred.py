"""A selection over rows that were appended first: held chunks, accepted drafts, every layer seen before deciding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..contract import Phase, Transaction
from ..evidence import CarriedEvidence
from ..positions import alibi_in
from ..storage import RowMap
from .decide import Candidates, Decider, Observed
from .evidence_blocks import SegmentQueries, observe_queries, query_clock
from .queries import QueryWindow, windowed
from .replacing import merging_of
from .snapshot import OpenSegment, Snapshot
from .view import published_rows
from .visibility import SeenRows, Visibility

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["absorb_held", "decide_appended", "laid_behind"]


def decide_appended(
    runtime: Runtime,
    snapshot: Snapshot,
    transaction: Transaction,
    budget_rows: tuple[int, ...],
    *,
    ends_prompt: bool,
) -> Snapshot:
    """Return the successor of a snapshot whose rows now compete.

    Reads the snapshot's buffers, writes fresh ones; the snapshot itself stays readable.
    """
    layers, width, brought = runtime.geometry.num_layers, snapshot.width, snapshot.brought
    merging = merging_of(runtime.composition, snapshot)
    dense = all(count == width for count in snapshot.counts)
    decider = Decider(
        runtime.composition,
        runtime.geometry,
        transaction,
        counts=snapshot.counts,
        budget_rows=budget_rows,
        newest_tokens=snapshot.frontier.tokens,
        brought=brought,
        moves_keys=runtime.alibi is None,
        justified=dense and all(part.ordered for part in snapshot.maps),
        ends_prompt=ends_prompt,
        merging=merging,
    )
    segment = snapshot.open_segment
    window = _window(runtime, segment) if decider.drops_rows else None
    for layer in range(layers):
        transaction.enter_through(layer, Phase.ATTEND)
        table = snapshot.full_map(layer)
        # Queries were held where their layer computes.
        held = () if segment is None else segment.queries_BQWD
        keys, values = published_rows(snapshot, layer, held[layer].device if held else None)
        states = _states(runtime, snapshot, layer, keys, table, ends_prompt)
        candidates = Candidates(
            keys_BSND=keys, values_BSND=values, map=table, states_BSNX=states, stored=snapshot.rows_of(layer)
        )
        decider.observe(layer, candidates, _observe(runtime, snapshot, segment, window, layer, candidates, dense))
    chosen = decider.finish(layers)
    evicted = snapshot.frontier.columns if decider.is_final else snapshot.evicted_at_column
    successor = replace(
        snapshot,
        generations=transaction.successor,
        **chosen,
        tail=None,
        counts=decider.kept_counts,
        tail_counts=(0,) * snapshot.batch_size,
        budget_rows=budget_rows,
        scores_LBSWX=decider.stacked_states(),
        segment_tokens=snapshot.ended(snapshot.frontier.tokens, brought) if ends_prompt else snapshot.segment_tokens,
        open_segment=None,
        decision_epoch=snapshot.decision_epoch + 1,
        evicted_at_column=evicted,
    )
    return successor if merging is None else merging.settled(successor)


def laid_behind(chosen: Snapshot, waiting: Snapshot, length: int) -> Snapshot:
    """Return a waiting snapshot whose last `length` columns follow the rows that were chosen from what it followed.

    For decode tokens that were fed while a prompt was held: it is chosen from before they are accepted. Their keys and
    values stay those of the forward that fed them.
    """
    assert waiting.tail is not None, "what waits was appended"
    used, start, rows = waiting.width - length, chosen.width, []
    for kept, fed in zip(chosen.rows, waiting.rows, strict=True):
        larger = kept.grown(start, start + length)
        larger.write(start, *fed.held(used, length))
        rows.append(larger)
    new = waiting.tail.last(length)
    new_counts = new.live_BMW[:, 0].sum(-1).tolist()
    scores = chosen.scores_LBSWX
    if scores is not None:
        scores = torch.cat([scores, scores.new_zeros((*scores.shape[:3], length, scores.shape[4]))], dim=3)
    return replace(
        chosen,
        frontier=waiting.frontier,
        foreign=waiting.foreign,
        rows=tuple(rows),
        pairs=tuple(
            kept.holding(start, fed.held(used, length)) for kept, fed in zip(chosen.pairs, waiting.pairs, strict=True)
        ),
        tail=new,
        counts=tuple(count + more for count, more in zip(chosen.counts, new_counts, strict=True)),
        tail_counts=tuple(new_counts),
        scores_LBSWX=scores,
        open_segment=waiting.open_segment,
        last_was_segment=waiting.last_was_segment,
    )


def absorb_held(runtime: Runtime, snapshot: Snapshot) -> Snapshot:
    """Return the snapshot with its held queries added to the rows' states; its segment stays open.

    For a prompt whose chunks are accepted one by one: queries that leave the held window must not be lost.
    """
    segment = snapshot.open_segment
    if segment is None or segment.window is None:
        return snapshot
    states = []
    for layer in range(runtime.geometry.num_layers):
        keys, table = published_rows(snapshot, layer)[0], snapshot.full_map(layer)
        states.append(_states(runtime, snapshot, layer, keys, table, True))
    kept = [state for state in states if state is not None]
    opened = replace(segment, window=None, queries_BQWD=())
    scores = torch.stack([state.to(snapshot.device) for state in kept])
    return replace(snapshot, scores_LBSWX=scores, open_segment=opened)


def _window(runtime: Runtime, segment: OpenSegment | None) -> QueryWindow | None:
    wanted = runtime.composition.evidence.window_queries
    if segment is None or segment.window is None or not wanted:
        return None
    return segment.window.last(wanted)


def _states(
    runtime: Runtime, snapshot: Snapshot, layer: int, keys: Tensor, table: RowMap, ends_prompt: bool
) -> Tensor | None:
    """Return a layer's states with the queries that waited for acceptance added."""
    evidence, stored = runtime.composition.evidence, snapshot.scores_LBSWX
    if not isinstance(evidence, CarriedEvidence) or stored is None:
        return None
    states, segment = stored[layer].to(keys.device, copy=True), snapshot.open_segment
    if segment is None or segment.window is None:
        return states
    window = segment.window
    columns = window.columns_BW.expand(snapshot.batch_size, -1)
    # A query's token position is that of the row its own column became (0 for one that was rejected, never read).
    own = table.columns_BMW[:, 0].long()[:, None, :] == columns[:, :, None]
    tokens = (own * table.tokens_BMW[:, 0].long()[:, None, :]).sum(-1)
    real = own.logical_and(table.live_BMW[:, 0][:, None, :]).any(-1)
    visibility = _visibility(runtime, snapshot, segment, dense=False)
    queries = SegmentQueries(
        layer=layer,
        queries_BQTD=segment.queries_BQWD[layer],
        columns_BT=columns,
        query_tokens_BT=tokens,
        real_BT=real if window.real_BW is None else real & window.real_BW,
        clock_BT=query_clock(tokens, snapshot.segment_tokens, ends_prompt),
        keys_BSND=keys,
        view=table,
        visibility=visibility,
        scaling=segment.scalings[layer],
        weighting=segment.weightings[layer],
    )
    observe_queries(evidence, runtime.composition.group, states, queries, keep_all=True)
    return states


def _visibility(runtime: Runtime, snapshot: Snapshot, segment: OpenSegment, *, dense: bool) -> Visibility:
    return Visibility(
        record=segment.rule,
        columns_after=snapshot.frontier.columns,
        dense=dense,
        changed_mask_BF=None,
        alibi=alibi_in(runtime.alibi, snapshot.dtype),
    )


def _observe(
    runtime: Runtime,
    snapshot: Snapshot,
    segment: OpenSegment | None,
    window: QueryWindow | None,
    layer: int,
    candidates: Candidates,
    dense: bool,
) -> Observed:
    if segment is None or window is None:
        return Observed(queries_BQWD=None, real_BW=None, visibility=None, scaling=1.0)
    queries = windowed(segment.queries_BQWD[layer], window)
    visibility = _visibility(runtime, snapshot, segment, dense=dense)
    return Observed(
        queries_BQWD=queries,
        real_BW=window.real_BW,
        visibility=SeenRows(visibility=visibility, view=candidates.map, columns_BW=window.columns_BW),
        scaling=segment.scalings[layer],
        weighting=segment.weightings[layer],
    )
