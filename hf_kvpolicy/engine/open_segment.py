"""A prompt segment that was fed and is not chosen from yet: its rule, and the queries held for the choice.

Letters: B batch rows, Q query heads, W held queries, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ..masks import MaskRecord
from ..weighting import Weighting
from .placement import Moves, Placement
from .queries import QueryWindow

__all__ = ["OpenSegment"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpenSegment:
    """A prompt segment whose selection still waits: for more chunks, or for acceptance."""

    start_column: int
    # The masking rule of the segment, without masks of its own.
    rule: MaskRecord
    # How each layer makes weights of its products; set as the segment's first forward ends.
    scalings: tuple[float, ...] = ()
    weightings: tuple[Weighting, ...] = ()
    # Which queries are held and, per layer, the queries [B, Q, W, D]; none for evidence that needs none.
    window: QueryWindow | None = None
    queries_BQWD: tuple[Tensor, ...] = ()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        if self.window is None:
            return self.queries_BQWD
        return (*self.queries_BQWD, *self.window.tensors())

    def cropped(self, column: int) -> OpenSegment | None:
        """Return the segment as if nothing at or after a column had been fed; None if nothing of it is left."""
        if column <= self.start_column:
            return None
        return self if self.window is None else replace(self, window=self.window.before_column(column))

    def lacks_queries(self, column: int, wanted: int) -> bool:
        """Whether a crop to a column would leave fewer queries than a selection takes, while earlier ones are gone."""
        window = self.window
        if window is None or column <= self.start_column:
            return False
        real = window.columns_BW >= 0 if window.real_BW is None else window.real_BW
        left = (real & (window.columns_BW < column)).sum(-1)
        # A batch row with room in its window holds all its queries of the segment.
        first = window.columns_BW.masked_fill(~real, self.start_column).amin(-1)
        return bool(((left < wanted) & (first > self.start_column)).any())

    def batch(self, index_B: Tensor) -> OpenSegment:
        """Return the segment with its batch rows selected, repeated or reordered."""
        queries = tuple(q.index_select(0, index_B.to(q.device)) for q in self.queries_BQWD)
        return replace(self, queries_BQWD=queries, window=None if self.window is None else self.window.batch(index_B))

    def to(self, place: Placement, move: Moves) -> OpenSegment:
        """Return the segment with its held queries on the devices given."""
        queries = tuple(move(held, device) for held, device in zip(self.queries_BQWD, place.layers, strict=False))
        return replace(
            self, queries_BQWD=queries, window=None if self.window is None else move(self.window, place.shared)
        )
