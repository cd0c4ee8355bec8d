"""What the plain oracles of PyramidKV, ZigZagKV and Ada-KV share (contract 0x08): one unpadded sequence, in float64.

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


class Segment:
    """A prompt segment that ended: candidate rows, what stays anyway, and every competing row's score."""

    def __init__(
        self,
        held: Kept,
        new_tokens: int,
        queries_LQFD: Array,
        keys_LHFD: Array,
        *,
        budget: int,
        window: int,
        kernel_size: int = 7,
        pooling: str = "max",
        group: str = "mean",
        unit: str = "head",
        protect: Sequence[int] = (),
        observes_all: bool = False,
    ) -> None:
        """Arrays hold every token ever fed; `observes_all` scores by all of the segment's queries, without pooling."""
        self.depth, query_heads, tokens, _ = queries_LQFD.shape
        first, self.heads = tokens - new_tokens, keys_LHFD.shape[1]
        self.rows = [[[*kept, *range(first, tokens)] for kept in layer] for layer in held]
        self.always = {t for t in range(tokens) if t >= tokens - window or t in protect}
        self.spare = budget - len(self.always)
        self.caps = [[len(owner) - len(self.always) for owner in layer] for layer in self.rows]
        observed = list(range(first if observes_all else max(first, tokens - window), tokens))
        # Attention of each query head, [layer][head][query head of it]; scores by token, [layer][head].
        self.attention: list[list[list[Array]]] = []
        self.scores: list[list[dict[int, float]]] = []
        for layer in range(self.depth):
            seen = []
            for head in range(self.heads):
                mine = range(head * query_heads // self.heads, (head + 1) * query_heads // self.heads)
                at = self.rows[layer][head]
                keys = keys_LHFD[layer, head, at]
                seen.append([votes(queries_LQFD[layer, q, observed], observed, keys, at) for q in mine])
            vote = [GROUP[group](np.stack(one), axis=0) for one in seen]
            vote = [np.sum(vote, axis=0)] * self.heads if unit == "layer" else vote
            self.attention.append(seen)
            self.scores.append([])
            for head in range(self.heads):
                prefix = [t for t in self.rows[layer][head] if t < tokens - window]
                raw = list(vote[head][: len(prefix)])
                near = raw if observes_all else pool(raw, kernel_size, pooling)
                pairs = zip(prefix, near, strict=True)
                self.scores[-1].append({t: score for t, score in pairs if t not in self.always})

    @property
    def fits(self) -> bool:
        """Whether nothing has to go."""
        return sum(map(sum, self.caps)) <= self.spare * self.depth * self.heads

    def keep(self, counts_LS: Sequence[Sequence[int]]) -> Kept:
        """Return what stays when every owner keeps so many of its competing rows."""
        return [
            [
                sorted(self.always.intersection(self.rows[layer][h]) | set(_best(self.scores[layer][h], counts[h])))
                for h in range(self.heads)
            ]
            for layer, counts in enumerate(counts_LS)
        ]


def _best(scores: dict[int, float], count: int) -> list[int]:
    return sorted(scores, key=lambda t: (-scores[t], t))[:count]
