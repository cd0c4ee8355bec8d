"""Which cells no other cell beats in everything: bytes, quality and decode time."""

from __future__ import annotations

from collections.abc import Iterable

from .summary import CellSummary, Measured
from .sweep import NO_CONTEXT

__all__ = ["dominates", "is_compared", "on_front"]


def on_front(group: Iterable[CellSummary]) -> list[CellSummary]:
    """The compared cells that none of the others dominates, fewest bytes first; all are of one task point."""
    measured = [
        (summary, summary.measured) for summary in group if is_compared(summary) and summary.measured is not None
    ]
    front = [
        (found.measured_bytes, summary)
        for summary, found in measured
        if not any(dominates(other, found) for _, other in measured)
    ]
    return [summary for _, summary in sorted(front, key=lambda entry: entry[0])]


def is_compared(summary: CellSummary) -> bool:
    """Whether a cell can be on the front: it was measured, and with its text in the prompt."""
    return summary.measured is not None and summary.cell.policy != NO_CONTEXT


def dominates(one: Measured, other: Measured) -> bool:
    """Whether `one` is at least as good in bytes, score and decode time, and better in one of them."""
    ours, theirs = _costs(one), _costs(other)
    return ours != theirs and all(a <= b for a, b in zip(ours, theirs, strict=True))


def _costs(measured: Measured) -> tuple[float, float, float]:
    return measured.measured_bytes, -measured.score.mean, measured.decode_ms_per_token
