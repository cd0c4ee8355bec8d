"""Plain oracle of HeadKV (arXiv 2410.19258; contract 0x08G), one unpadded sequence, in float64.

Of b rows beside the protected ones, b / beta go into a pool: b_h = (b - b / beta) + S_h (b / beta) L H. Whole rows by
largest remainder, never above what an owner has; rows by SnapKV's pooled votes.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor

import numpy as np
from numpy.typing import NDArray

from .snapkv import GROUP, pool, votes

Array = NDArray[np.float64]
Kept = list[list[list[int]]]  # [layer][owner] -> ascending positions


def open_rows(importance: Sequence[float], mean: int, beta: float, caps: Sequence[int]) -> list[int]:
    """Return the competing rows of every owner, layer-major."""
    owners, pooled = len(importance), Fraction(mean) / Fraction(str(beta))
    weights = [Fraction(str(value)) for value in importance]
    targets = [mean - pooled + weight / sum(weights) * pooled * owners for weight in weights]
    rows = [min(cap, floor(target)) for target, cap in zip(targets, caps, strict=True)]
    while sum(rows) < min(mean * owners, sum(caps)):
        growing = [i for i in range(owners) if rows[i] < caps[i]]
        rows[max(growing, key=lambda i: (targets[i] - rows[i], -i))] += 1
    return rows


def after_segment(
    held: Kept,
    new_tokens: int,
    queries_LQFD: Array,
    keys_LHFD: Array,
    *,
    profile: Sequence[Sequence[float]],
    budget: int,
    window: int,
    beta: float,
    kernel_size: int = 7,
    pooling: str = "max",
    group: str = "mean",
    protect: Sequence[int] = (),
) -> Kept:
    """Return what is kept once a prompt segment of `new_tokens` ended; arrays hold every token ever fed."""
    depth, query_heads, tokens, _ = queries_LQFD.shape
    first, heads = tokens - new_tokens, keys_LHFD.shape[1]
    rows = [[[*kept, *range(first, tokens)] for kept in layer] for layer in held]
    always = {t for t in range(tokens) if t >= tokens - window or t in protect}
    caps = [len(owner) - len(always) for layer in rows for owner in layer]
    if sum(caps) <= (budget - len(always)) * depth * heads:
        return rows
    flat = [value for layer in profile for value in layer]
    counts = open_rows(flat, budget - len(always), beta, caps)
    observed = list(range(max(first, tokens - window), tokens))
    chosen: Kept = []
    for layer in range(depth):
        chosen.append([])
        for head in range(heads):
            at = rows[layer][head]
            mine = range(head * query_heads // heads, (head + 1) * query_heads // heads)
            seen = [votes(queries_LQFD[layer, q, observed], observed, keys_LHFD[layer, head, at], at) for q in mine]
            prefix = [t for t in at if t < tokens - window]
            vote = list(GROUP[group](np.stack(seen), axis=0))[: len(prefix)]
            score = dict(zip(prefix, pool(vote, kernel_size, pooling), strict=True))
            ranked = sorted((t for t in prefix if t not in always), key=lambda t: (-score[t], t))
            kept = ranked[: counts[layer * heads + head]]
            chosen[-1].append(sorted({*always.intersection(at), *kept}))
    return chosen
