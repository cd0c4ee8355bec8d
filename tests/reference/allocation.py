"""Plain oracles of PyramidKV, ZigZagKV and Ada-KV (contract 0x08), one unpadded sequence, in float64.

Votes and pooling are SnapKV's. Rows that every owner keeps (window, `protect`) are taken off the budget first; what
is left is distributed in whole rows by largest remainder, never above what an owner has.
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


def whole_rows(targets: Sequence[Fraction], total: int, caps: Sequence[int]) -> list[int]:
    """Round targets down within caps, then give row by row to whoever is furthest below its target."""
    rows = [min(cap, max(0, floor(target))) for target, cap in zip(targets, caps, strict=True)]
    owners = range(len(rows))
    while sum(rows) < min(total, sum(caps)):
        short = max((i for i in owners if rows[i] < caps[i]), key=lambda i: (targets[i] - rows[i], -i))
        rows[short] += 1
    while sum(rows) > total:
        over = max((i for i in owners if rows[i]), key=lambda i: (rows[i] - targets[i], i))
        rows[over] -= 1
    return rows


def pyramid_line(total: int, layers: int, beta: float) -> list[Fraction]:
    top = Fraction(total) / (Fraction(str(beta)) * layers)
    bottom = Fraction(2 * total, layers) - top
    return [bottom - Fraction(i, max(1, layers - 1)) * (bottom - top) for i in range(layers)]


def rows_for_mass(attention: Array, mass: float) -> int:
    total = 0.0
    for count, value in enumerate(sorted(attention, reverse=True), start=1):
        total += value
        if total >= mass * attention.sum():
            return count
    return len(attention)


def after_segment(
    held: Kept,
    new_tokens: int,
    queries_LQFD: Array,
    keys_LHFD: Array,
    *,
    policy: str,
    budget: int,
    window: int,
    kernel_size: int = 7,
    pooling: str = "max",
    group: str = "mean",
    unit: str = "head",
    protect: Sequence[int] = (),
    beta: float = 20,
    mass: float = 0.9,
    min_ratio: float = 0.2,
    alpha: float = 0.2,
    layers: str = "uniform",
    evidence: str = "snapkv",
) -> Kept:
    """Return what is kept once a prompt segment of `new_tokens` ended; arrays hold every token ever fed."""
    depth, query_heads, tokens, _ = queries_LQFD.shape
    first, heads = tokens - new_tokens, keys_LHFD.shape[1]
    rows = [[[*kept, *range(first, tokens)] for kept in layer] for layer in held]
    always = {t for t in range(tokens) if t >= tokens - window or t in protect}
    caps = [[len(owner) - len(always) for owner in layer] for layer in rows]
    if sum(map(sum, caps)) <= (budget - len(always)) * depth * heads:
        return rows
    observed = list(range(first if evidence == "h2o" else max(first, tokens - window), tokens))
    scores: list[list[dict[int, float]]] = []
    needs: list[float] = []
    for layer in range(depth):
        vote, counts = [], []
        for head in range(heads):
            mine = range(head * query_heads // heads, (head + 1) * query_heads // heads)
            at = rows[layer][head]
            seen = [votes(queries_LQFD[layer, q, observed], observed, keys_LHFD[layer, head, at], at) for q in mine]
            counts += [rows_for_mass(one, mass) for one in seen]
            vote.append(GROUP[group](np.stack(seen), axis=0))
        needs.append(float(np.mean(counts)))
        vote = [np.sum(vote, axis=0)] * heads if unit == "layer" else vote
        scores.append([])
        for head in range(heads):
            prefix = [t for t in rows[layer][head] if t < tokens - window]
            raw = list(vote[head][: len(prefix)])
            near = raw if evidence == "h2o" else pool(raw, kernel_size, pooling)
            scores[-1].append({t: s for t, s in zip(prefix, near, strict=True) if t not in always})
    spare = budget - len(always)
    shares = _shares(policy, layers, spare, depth, heads, caps, needs, beta, min_ratio)
    chosen = []
    for layer in range(depth):
        counts = shares[layer]
        if policy == "adakv":
            counts = _heads(sum(counts), scores[layer], caps[layer], alpha)
        chosen.append(
            [
                sorted(always.intersection(rows[layer][h]) | set(_best(scores[layer][h], counts[h])))
                for h in range(heads)
            ]
        )
    return chosen


def _shares(
    policy: str, layers: str, spare: int, depth: int, heads: int, caps: list[list[int]], needs: list[float],
    beta: float, min_ratio: float,
) -> list[list[int]]:  # fmt: skip
    """Return rows [layer][head]; for adakv only the layer's sum has a meaning."""
    if policy == "adakv":
        tops = [sum(layer) for layer in caps]
        total = spare * depth * heads
        line = pyramid_line(total, depth, beta) if layers == "pyramid" else [Fraction(spare * heads)] * depth
        return [[rows, *[0] * (heads - 1)] for rows in whole_rows(line, total, tops)]
    if policy == "pyramidkv":
        line = pyramid_line(spare * depth, depth, beta)
    else:
        low = Fraction(str(min_ratio)) * spare
        whole = sum(Fraction(str(n)) for n in needs)
        line = [low + (spare - low) * depth * Fraction(str(n)) / whole for n in needs]
    # Heads of a layer always hold alike in these two.
    return [[rows] * heads for rows in whole_rows(line, spare * depth, [layer[0] for layer in caps])]


def _heads(total: int, scores: list[dict[int, float]], caps: list[int], alpha: float) -> list[int]:
    ranked = sorted((-s, h, t) for h, own in enumerate(scores) for t, s in own.items())[:total]
    counts = [sum(1 for _, h, _ in ranked if h == head) for head in range(len(scores))]
    share = Fraction(str(alpha))
    targets = [share * count + (1 - share) * Fraction(total, len(scores)) for count in counts]
    return whole_rows(targets, total, caps)


def _best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(scores, key=lambda t: (-scores[t], t))[:count]
