"""What evidence sees and gives.

Letters: B batch rows, Q query heads, H KV heads, S score heads (H, or Q when query heads own rows), W observed
queries, N candidate rows, D head dimension, M map heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from ..weighting import PLAIN, Weighting

__all__ = ["Evidence", "LayerObservation", "Visibility"]


class Visibility(Protocol):
    """Tells which candidate rows each observed query may see."""

    def __call__(self) -> Tensor | None:
        """Return a mask (see `masking`) of [B, S, W, N], or None when every query sees every row and adds nothing."""
        ...

    def block(self, start: int, stop: int) -> tuple[Tensor | None, int]:
        """Return the mask of some queries, and how many of the first rows any of them sees.

        A mask of fewer rows is about the newest of those; all queries see the rows before them.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerObservation:
    """One layer's candidates and the last queries of the segment, as attention saw them (after rotation)."""

    layer: int
    # The last observed queries of the segment; None for evidence that needs none.
    queries_BQWD: Tensor | None
    # Which observed queries are real tokens of their batch row, [B, W]; None when all are.
    observed_BW: Tensor | None
    keys_BHND: Tensor
    tokens_BMN: Tensor
    # Which rows the observed queries see; None for evidence that needs no queries.
    visibility: Visibility | None
    scaling: float
    # Which of the layer's stored heads is the first one observed: owners of unequal length come one by one.
    first_head: int = 0
    # States that rows carry, [B, S, N, X]; None for evidence without any.
    state_BSNX: Tensor | None = None
    # What the layer does beyond a softmax; sinks are those of the observed queries' heads.
    weighting: Weighting = PLAIN


class Evidence(Protocol):
    """Scores candidate rows; higher stays. Stateless: everything it needs comes in the observation."""

    @property
    def name(self) -> str:
        """The evidence family, as the manifest names it."""
        ...

    @property
    def window_queries(self) -> int:
        """Queries at the end of a segment it must see; 0 for none."""
        ...

    @property
    def differs_by_layer(self) -> bool:
        """Whether layers and heads score differently; False means one position-only set serves the whole cache."""
        ...

    def votes(self, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        """Return fp32 votes [B, S, N] (S = 1 for evidence that is the same for all heads)."""
        ...

    def refine(self, votes_BMN: Tensor) -> Tensor:
        """Return final scores from votes in ascending token order (pooling); votes are already reduced to map heads."""
        ...

    def describe(self) -> dict[str, Any]:
        """Return the JSON-able parameters that enter the manifest."""
        ...
