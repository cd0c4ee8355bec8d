"""Visible sets of the static policies as plain references (0x03-0x05).

The frontier F is exclusive: positions 0 .. F-1 are committed. Every set is ascending original positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from ._checks import check_int

__all__ = [
    "full_visible",
    "history_row_instances",
    "omitted_from_source",
    "removed_from_parent",
    "ring_slot",
    "sink_and_recent_count",
    "sink_and_recent_visible",
    "sink_recent_overlap",
    "sliding_window_count",
    "sliding_window_visible",
]


def full_visible(frontier: int) -> tuple[int, ...]:
    """Every committed position (0x03)."""
    check_int("frontier", frontier)
    return tuple(range(frontier))


def sliding_window_visible(frontier: int, window_rows: int) -> tuple[int, ...]:
    """The last `window_rows` committed positions (0x04)."""
    check_int("frontier", frontier)
    check_int("window_rows", window_rows, minimum=1)
    return tuple(range(max(0, frontier - window_rows), frontier))


def sliding_window_count(frontier: int, window_rows: int) -> int:
    """Rows of the window: min(F, W) (0x04)."""
    check_int("frontier", frontier)
    check_int("window_rows", window_rows, minimum=1)
    return min(frontier, window_rows)


def sink_and_recent_visible(frontier: int, sink_rows: int, window_rows: int) -> tuple[int, ...]:
    """The union of the first `sink_rows` and the last `window_rows` positions (0x05)."""
    check_int("sink_rows", sink_rows)
    recent = sliding_window_visible(frontier, window_rows)
    return tuple(sorted({*range(min(sink_rows, frontier)), *recent}))


def sink_recent_overlap(frontier: int, sink_rows: int, window_rows: int) -> int:
    """Positions that are sink and recent at once: max(0, min(K_s, F) - max(0, F - W)) (0x05)."""
    check_int("frontier", frontier)
    check_int("sink_rows", sink_rows)
    check_int("window_rows", window_rows, minimum=1)
    return max(0, min(sink_rows, frontier) - max(0, frontier - window_rows))


def sink_and_recent_count(frontier: int, sink_rows: int, window_rows: int) -> int:
    """Rows of the union: min(K_s, F) + min(W, F) - overlap; K_s + W is only its saturated bound (0x05)."""
    overlap = sink_recent_overlap(frontier, sink_rows, window_rows)
    return min(sink_rows, frontier) + min(window_rows, frontier) - overlap


def ring_slot(position: int, window_rows: int) -> int:
    """The slot of an original position in a ring of `window_rows`: an address, not a position (0x04)."""
    check_int("position", position)
    check_int("window_rows", window_rows, minimum=1)
    return position % window_rows


def omitted_from_source(frontier: int, visible: Iterable[int]) -> tuple[int, ...]:
    """Committed positions that are not visible, whether or not they ever were (0x04)."""
    held = set(visible)
    return tuple(p for p in full_visible(frontier) if p not in held)


def removed_from_parent(parent_visible: Sequence[int], successor_visible: Iterable[int]) -> tuple[int, ...]:
    """Positions the parent view held and the successor does not, in the parent's order (0x04)."""
    held = set(successor_visible)
    return tuple(p for p in parent_visible if p not in held)


def history_row_instances(frontiers: Iterable[int], visible: Callable[[int], Sequence[int]]) -> int:
    """Rows read over decode steps at the given cached-history frontiers, the current row excluded (0x04)."""
    return sum(len(visible(frontier)) for frontier in frontiers)
