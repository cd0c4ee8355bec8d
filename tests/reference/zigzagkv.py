"""Plain oracle of ZigZagKV (arXiv 2412.09036; contract 0x08D): layers by how many rows hold most of their attention."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np

from .owners import Array, Kept, Segment, whole_rows


def rows_for_mass(attention: Array, mass: float) -> int:
    total = 0.0
    for count, value in enumerate(sorted(attention, reverse=True), start=1):
        total += value
        if total >= mass * attention.sum():
            return count
    return len(attention)


def after_segment(
    held: Kept, new_tokens: int, queries_LQFD: Array, keys_LHFD: Array, *, mass: float = 0.9, min_ratio: float = 0.2,
    **options: Any,
) -> Kept:  # fmt: skip
    """Return what is kept once a prompt segment of `new_tokens` ended."""
    segment = Segment(held, new_tokens, queries_LQFD, keys_LHFD, **options)
    if segment.fits:
        return segment.rows
    needs = [
        Fraction(str(float(np.mean([rows_for_mass(one, mass) for head in layer for one in head]))))
        for layer in segment.attention
    ]
    low = Fraction(str(min_ratio)) * segment.spare
    line = [low + (segment.spare - low) * segment.depth * need / sum(needs) for need in needs]
    rows = whole_rows(line, segment.spare * segment.depth, [layer[0] for layer in segment.caps])
    return segment.keep([[count] * segment.heads for count in rows])
