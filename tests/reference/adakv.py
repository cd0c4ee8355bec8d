"""Plain oracle of Ada-KV (arXiv 2407.11550; contract 0x08E): heads compete for their layer's rows, with a safeguard."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from .owners import Array, Kept, Segment, whole_rows
from .pyramidkv import pyramid_line


def after_segment(
    held: Kept, new_tokens: int, queries_LQFD: Array, keys_LHFD: Array, *, alpha: float = 0.2, beta: float = 20,
    layers: str = "uniform", evidence: str = "snapkv", **options: Any,
) -> Kept:  # fmt: skip
    """Return what is kept once a prompt segment of `new_tokens` ended."""
    segment = Segment(held, new_tokens, queries_LQFD, keys_LHFD, observes_all=evidence == "h2o", **options)
    if segment.fits:
        return segment.rows
    depth, heads = segment.depth, segment.heads
    total = segment.spare * depth * heads
    line = pyramid_line(total, depth, beta) if layers == "pyramid" else [Fraction(segment.spare * heads)] * depth
    shares = whole_rows(line, total, [sum(layer) for layer in segment.caps])
    return segment.keep([_heads(shares[i], segment.scores[i], segment.caps[i], alpha) for i in range(depth)])


def _heads(total: int, scores: list[dict[int, float]], caps: list[int], alpha: float) -> list[int]:
    ranked = sorted((-s, h, t) for h, own in enumerate(scores) for t, s in own.items())[:total]
    counts = [sum(1 for _, h, _ in ranked if h == head) for head in range(len(scores))]
    share = Fraction(str(alpha))
    targets = [share * count + (1 - share) * Fraction(total, len(scores)) for count in counts]
    return whole_rows(targets, total, caps)
