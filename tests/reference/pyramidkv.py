"""Plain oracle of PyramidKV (arXiv 2406.02069; contract 0x08B): layers on a line from k_bottom down to k_top."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from .owners import Array, Kept, Segment, whole_rows


def pyramid_line(total: int, layers: int, beta: float) -> list[Fraction]:
    top = Fraction(total) / (Fraction(str(beta)) * layers)
    bottom = Fraction(2 * total, layers) - top
    return [bottom - Fraction(i, max(1, layers - 1)) * (bottom - top) for i in range(layers)]


def after_segment(
    held: Kept, new_tokens: int, queries_LQFD: Array, keys_LHFD: Array, *, beta: float = 20, **options: Any
) -> Kept:
    """Return what is kept once a prompt segment of `new_tokens` ended."""
    segment = Segment(held, new_tokens, queries_LQFD, keys_LHFD, **options)
    if segment.fits:
        return segment.rows
    total = segment.spare * segment.depth
    # Heads of a layer always hold alike.
    rows = whole_rows(pyramid_line(total, segment.depth, beta), total, [layer[0] for layer in segment.caps])
    return segment.keep([[count] * segment.heads for count in rows])
