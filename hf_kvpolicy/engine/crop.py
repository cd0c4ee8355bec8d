"""Taking back the last columns of a snapshot in which nothing was dropped since."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..errors import StaleGenerationError
from ..storage import RowMap
from .composition import Composition
from .foreign import cropped_layers
from .published import Waiting
from .replacing import merge_waiting
from .snapshot import Frontier, Snapshot

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["accepted_of", "cropped", "refuse_untakeable"]


def accepted_of(runtime: Runtime, waiting: Waiting, rejected: int) -> Snapshot:
    """Return what a finished forward leaves once its last `rejected` tokens are rejected and the others accepted."""
    accepted = cropped(waiting.snapshot, rejected)
    return merge_waiting(runtime, accepted, waiting.length - rejected) if accepted.pending else accepted


def cropped(snapshot: Snapshot, removed: int) -> Snapshot:
    """Return the snapshot as if its last `removed` columns had never been fed.

    The caller makes sure that no row was dropped at or after the first removed column. Buffers are shared: slots whose
    rows are gone are dead, and those behind all others are free.
    """
    if not removed and not snapshot.foreign:
        return snapshot
    # Sliding layers let go of what only rejected tokens could have needed, even where none is rejected.
    foreign = cropped_layers(snapshot.foreign, removed, snapshot.frontier.columns - removed)
    if not removed:
        return replace(snapshot, foreign=foreign)
    frontier = snapshot.frontier.cropped(removed)
    if not frontier.columns:
        return Snapshot(generations=snapshot.generations, frontier=Frontier(), budget_rows=None, foreign=foreign)
    lost = [a - b for a, b in zip(snapshot.frontier.tokens, frontier.tokens, strict=True)]
    tail, maps, ragged = snapshot.tail, snapshot.maps, snapshot.ragged
    from_tail = 0 if tail is None else min(removed, tail.width)
    if tail is not None and from_tail:
        tail = tail.first(tail.width - from_tail)
    if removed > from_tail:
        ragged = snapshot.packed().ragged
        maps = _without_dead_end(snapshot, tuple(part.before_column(frontier.columns) for part in maps))
        ragged = tuple(replace(layer, map=layer.map.before_column(frontier.columns)) for layer in ragged)
    scores = snapshot.scores_LBSWX
    free = from_tail + sum(part.width for part in snapshot.maps[:1]) - sum(part.width for part in maps[:1])
    if scores is not None and free and not ragged:
        scores = scores[:, :, :, : scores.shape[3] - free].clone()
    segment = snapshot.open_segment
    kept = replace(
        snapshot,
        frontier=frontier,
        foreign=foreign,
        maps=maps,
        ragged=ragged,
        pairs=tuple(pair.first(snapshot.width - from_tail) for pair in snapshot.pairs),
        tail=tail,
        scores_LBSWX=scores,
        counts=tuple(count - gone for count, gone in zip(snapshot.counts, lost, strict=True))
        if snapshot.counts
        else (),
        tail_counts=tuple(max(0, n - gone) for n, gone in zip(snapshot.tail_counts, lost, strict=True)),
        segment_tokens=_at_most(snapshot.segment_tokens, frontier.tokens),
        settled_tokens=_at_most(snapshot.settled_tokens, frontier.tokens),
        open_segment=None if segment is None else segment.cropped(frontier.columns),
    )
    if scores is None or not ragged or any(kept.undecided_tokens):
        return kept if removed == from_tail else kept.without_dead_exceptions()
    # The whole answer is gone: no query that is taken back left anything in a score.
    return replace(kept, scores_LBSWX=None)


def _without_dead_end(snapshot: Snapshot, maps: tuple[RowMap, ...]) -> tuple[RowMap, ...]:
    """Return the maps of a cropped snapshot without the last slots, where no owner has a row in them.

    A residual is coded by its slots: dead ones would take the place of rows that are to stay as they are.
    """
    if not snapshot.rows or snapshot.pairs:
        return maps
    live = torch.stack([part.live_BMW.any(1).any(0) for part in maps]).any(0)
    used = int(live.nonzero().amax()) + 1 if bool(live.any()) else 0
    return tuple(part.first(max(used, snapshot.rows[0].residual)) for part in maps)


def refuse_untakeable(
    snapshot: Snapshot, successor: Snapshot | None, policy: Composition, removed: int, left: int
) -> None:
    """Refuse to take back accepted tokens that left a trace in what would stay.

    Raises:
        StaleGenerationError: their queries are part of scores, or rows were dropped since.
    """
    scored = policy.carries_scores or (successor is not None and successor.scores_LBSWX is not None)
    if scored and 0 < left < snapshot.frontier.columns:
        raise StaleGenerationError(
            f"crop(-{removed}) would take back accepted tokens, whose queries are part of the scores of the rows they "
            f"saw. {policy.before_taking_back}"
        )
    segment = snapshot.open_segment
    wanted = policy.evidence.window_queries if removed and successor is not None else 0
    if segment is not None and wanted and segment.lacks_queries(left, wanted):
        raise StaleGenerationError(
            f"crop(-{removed}) would take back the last queries of a held prompt, by which its rows are chosen, and no "
            f"earlier ones are held. {policy.before_taking_back}"
        )
    if successor is None:
        raise StaleGenerationError(
            f"crop(-{removed}) goes back to column {left}, but rows were dropped, quantized or merged for good at "
            f"column {snapshot.evicted_at_column}. {policy.before_taking_back}"
        )


def _at_most(marks: tuple[int, ...], tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(min(pair) for pair in zip(marks, tokens, strict=True)) if marks else ()
