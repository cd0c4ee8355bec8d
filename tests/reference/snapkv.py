"""Plain oracle of SnapKV (arXiv 2404.14469, section 4; contract 0x07), one unpadded sequence, in float64.

A_obs = softmax(mask_causal(Q_obs K^T / sqrt(d))) over every visible row; vote[j] = sum_i A_obs[i, j] for prefix rows j;
pooled = Pool1D(vote), out-of-range terms zero; selected = TopK(pooled, C - W), ties to the lower position; the W newest
rows stay. Query heads of a KV head are reduced (`group`) before heads, layers (`unit`) and pooling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kept = list[list[list[int]]]  # [layer][owner] -> ascending positions
GROUP = {"mean": np.mean, "max": np.max, "sum": np.sum}


def votes(queries_WD: Array, query_tokens: Sequence[int], keys_ND: Array, row_tokens: Sequence[int]) -> Array:
    """Return the attention that one query head's observed queries pay to each row, summed over the queries."""
    total = np.zeros(len(row_tokens))
    for query, position in zip(queries_WD, query_tokens, strict=True):
        logits = keys_ND @ query / np.sqrt(len(query))
        weights = np.where(np.array(row_tokens) <= position, np.exp(logits - logits.max()), 0.0)
        total += weights / weights.sum()
    return total


def pool(vote: Sequence[float], kernel_size: int, pooling: str) -> list[float]:
    """Return stride-one pooled votes of the same length."""
    reach = kernel_size // 2
    out = []
    for j in range(len(vote)):
        near = [vote[i] if 0 <= i < len(vote) else 0.0 for i in range(j - reach, j + reach + 1)]
        out.append(max(near) if pooling == "max" else sum(near) / kernel_size)
    return out


def after_segment(
    held: Kept,
    new_tokens: int,
    queries_LQFD: Array,
    keys_LHFD: Array,
    *,
    budget: int,
    window: int,
    kernel_size: int,
    pooling: str,
    group: str = "mean",
    unit: str = "head",
    protect: Sequence[int] = (),
    pairs: Sequence[tuple[int, int]] = (),
) -> Kept:
    """Return what is kept once a prompt segment of `new_tokens` ended; arrays hold every token ever fed.

    `held` has one entry per stored head: the KV heads, or the query heads where those own rows.
    """
    layers, query_heads, tokens, _ = queries_LQFD.shape
    first, owners, kv_heads = tokens - new_tokens, len(held[0]), keys_LHFD.shape[1]
    rows = [[[*kept, *range(first, tokens)] for kept in layer] for layer in held]
    if len(rows[0][0]) <= budget:
        return rows
    observed = list(range(max(first, tokens - window), tokens))
    vote: list[list[Array]] = []
    for layer in range(layers):
        vote.append([])
        for owner in range(owners):
            mine = range(owner * query_heads // owners, (owner + 1) * query_heads // owners)
            at = rows[layer][owner]
            seen = [
                votes(queries_LQFD[layer, q, observed], observed, keys_LHFD[layer, q * kv_heads // query_heads, at], at)
                for q in mine
            ]
            vote[layer].append(GROUP[group](np.stack(seen), axis=0))
    if unit == "layer":
        vote = [[np.mean(layer, axis=0)] * owners for layer in vote]
    for lower, deeper in pairs if unit == "pair" else ():
        vote[lower] = vote[deeper] = [np.mean(both, axis=0) for both in zip(vote[lower], vote[deeper], strict=True)]
    if unit == "token":
        vote = [[np.mean([v for layer in vote for v in layer], axis=0)] * owners] * layers
    return [
        [_choose(rows[i][s], list(vote[i][s]), tokens, budget, window, kernel_size, pooling, protect)
         for s in range(owners)]
        for i in range(layers)
    ]  # fmt: skip


def _choose(
    rows: list[int], vote: list[float], tokens: int, budget: int, window: int, kernel: int, pooling: str,
    protect: Sequence[int],
) -> list[int]:  # fmt: skip
    prefix = [t for t in rows if t < tokens - window]
    pooled = dict(zip(prefix, pool(vote[: len(prefix)], kernel, pooling), strict=True))
    always = [t for t in prefix if t in protect]
    ranked = sorted((t for t in prefix if t not in always), key=lambda t: (-pooled[t], t))
    return sorted(always + ranked[: budget - window - len(always)]) + rows[len(prefix) :]


def after_decode(held: Kept, token: int) -> Kept:
    """Return what is kept after one decode token: every owner appends it, nothing is selected."""
    return [[[*kept, token] for kept in layer] for layer in held]
