"""Ordered position sets of all owners, materialised only when somebody reads them.

A `PositionSets` value is indexed [layer][owner][rank]; owners of one layer run batch row first: owner = b * H
+ h.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

__all__ = ["LazyPositions", "PositionSets", "freeze_positions", "omitted_intervals"]

PositionSets: TypeAlias = tuple[tuple[tuple[int, ...], ...], ...]
NestedPositions: TypeAlias = Sequence[Sequence[Sequence[int]]]


def freeze_positions(nested: NestedPositions) -> PositionSets:
    """Return nested sequences [layer][owner][rank] as tuples of ints, in the given order."""
    return tuple(tuple(tuple(int(p) for p in owner) for owner in layer) for layer in nested)


class LazyPositions:
    """A source of position sets that is asked at most once.

    The source may raise StaleGenerationError when its store has moved on; a failure is not remembered. One
    instance may be shared by a state and a receipt so that the store is read once for both.
    """

    __slots__ = ("_positions", "_source")

    def __init__(self, source: Callable[[], NestedPositions]) -> None:
        self._source: Callable[[], NestedPositions] | None = source
        self._positions: PositionSets | None = None

    @classmethod
    def wrap(cls, source: Callable[[], NestedPositions]) -> LazyPositions:
        """Return `source` itself if it is lazy already, else a LazyPositions around it."""
        return source if isinstance(source, cls) else cls(source)

    def __call__(self) -> PositionSets:
        source = self._source
        if self._positions is None and source is not None:
            self._positions = freeze_positions(source())
            self._source = None  # The store behind it may be freed once it was read.
        return self._positions or ()


def omitted_intervals(owners: Iterable[Sequence[int]], *, origin: int, stop: int) -> tuple[tuple[int, int], ...]:
    """Return the half-open intervals of [origin, stop) that none of the `owners` holds, ascending."""
    held = sorted({p for owner in owners for p in owner if origin <= p < stop})
    gaps: list[tuple[int, int]] = []
    expected = origin
    for position in [*held, stop]:
        if position > expected:
            gaps.append((expected, position))
        expected = position + 1
    return tuple(gaps)
