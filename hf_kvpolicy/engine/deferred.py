"""A selection over rows that were appended first: held chunks, accepted drafts, every layer seen before deciding."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..contract import Phase, Transaction
from .decide import Candidates, Decider, Observed
from .queries import QueryWindow
from .snapshot import OpenSegment, Snapshot
from .view import published_keys
from .visibility import Visibility

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["decide_appended"]


def decide_appended(
    runtime: Runtime, snapshot: Snapshot, transaction: Transaction, budget_rows: tuple[int, ...]
) -> tuple[Snapshot, Decider]:
    """Return the successor of a snapshot whose rows now compete, and the selection that made it.

    Reads the snapshot's buffers, writes fresh ones; the snapshot itself stays readable.
    """
    layers, width = runtime.geometry.num_layers, snapshot.width
    dense = all(count == width for count in snapshot.counts)
    decider = Decider(
        runtime.composition,
        runtime.geometry,
        transaction,
        counts=snapshot.counts,
        budget_rows=budget_rows,
        newest_tokens=snapshot.frontier.tokens,
        justified=dense and all(part.ordered for part in snapshot.maps),
    )
    segment = snapshot.open_segment
    window = _window(runtime, segment) if decider.drops_rows else None
    for layer in range(layers):
        transaction.enter_through(layer, Phase.ATTEND)
        rows, table = snapshot.rows[layer], snapshot.full_map(layer)
        candidates = Candidates(
            keys_BSND=published_keys(rows, width), values_BSND=rows.values_BSCD[:, :, :width], map=table
        )
        decider.observe(layer, candidates, _observe(snapshot, segment, window, layer, candidates, dense))
    new_rows, maps = decider.finish(layers)
    evicted = snapshot.frontier.columns if decider.drops_rows else snapshot.evicted_at_column
    successor = replace(
        snapshot,
        generations=transaction.successor,
        rows=new_rows,
        maps=maps,
        tail=None,
        counts=decider.kept_counts,
        tail_counts=(0,) * snapshot.batch_size,
        budget_rows=budget_rows,
        open_segment=None,
        decision_epoch=snapshot.decision_epoch + 1,
        evicted_at_column=evicted,
    )
    return successor, decider


def _window(runtime: Runtime, segment: OpenSegment | None) -> QueryWindow | None:
    if segment is None or segment.window is None:
        return None
    return segment.window.last(runtime.composition.evidence.window_queries)


def _observe(
    snapshot: Snapshot,
    segment: OpenSegment | None,
    window: QueryWindow | None,
    layer: int,
    candidates: Candidates,
    dense: bool,
) -> Observed:
    if segment is None or window is None:
        return Observed(queries_BQWD=None, real_BW=None, visibility=lambda: None, scaling=1.0)
    queries = segment.queries_BQWD[layer]
    if window.index_BW is None:
        queries = queries[:, :, queries.shape[2] - window.width :]
    else:
        batch, heads, _, dim = queries.shape
        queries = queries.gather(2, window.index_BW[:, None, :, None].expand(batch, heads, -1, dim))
    visibility = Visibility(
        record=segment.rule, columns_after=snapshot.frontier.columns, dense=dense, changed_mask_BF=None
    )
    return Observed(
        queries_BQWD=queries,
        real_BW=window.real_BW,
        visibility=lambda: visibility.for_queries(candidates.map, window.columns_BW),
        scaling=segment.scaling,
    )
