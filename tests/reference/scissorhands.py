"""Plain oracle of Scissorhands (Liu et al., arXiv 2305.17118; contract 0x06C-D), one unpadded sequence, in float64.

Each query leaves one bit on every row it sees: is its attention to the row, reduced over the query heads of the KV
head, below 1/n, n the rows it sees? A row's count is its bits among the last `history` queries. When a forward leaves
more than `budget` rows, the rows with the largest counts go, max(int(drop_ratio * budget), rows - budget) of them at
once, the lower position first among equals, never one of the `recent` newest. variant="reference": the bit is attention
below the value at ascending rank int(0.9 n) of that query's probabilities.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kept = list[list[list[int]]]  # [layer][KV head] -> ascending positions
GROUP = {"mean": np.mean, "max": np.max, "sum": np.sum}


@dataclass
class Owner:
    """Rows of one KV head; per query, its bit on each row it saw and the rows whose bit is too close to tell."""

    rows: list[int] = field(default_factory=list)
    keys: list[Array] = field(default_factory=list)
    low: list[dict[int, int]] = field(default_factory=list)
    unsure: list[dict[int, int]] = field(default_factory=list)


def low_counts(bits: Sequence[Mapping[int, int]], rows: Sequence[int]) -> dict[int, int]:
    """Return how often each row was low."""
    return {t: sum(query.get(t, 0) for query in bits) for t in rows}


def threshold(attention: Sequence[float], variant: str) -> float:
    """Return the value below which one query finds a row unimportant."""
    count = len(attention)
    return 1.0 / count if variant == "paper" else sorted(attention)[int(0.9 * count)]


def remaining(
    rows: Sequence[int], counts: Mapping[int, int], always: Sequence[int], budget: int, drop_rows: int
) -> list[int]:
    """Return the rows that stay."""
    if len(rows) <= budget:
        return list(rows)
    candidates = sorted((t for t in rows if t not in always), key=lambda t: (-counts[t], t))
    gone = candidates[: max(drop_rows, len(rows) - budget)]
    return [t for t in rows if t not in gone]


class Scissorhands:
    """One sequence: `append` a forward, `choose` what should stay, `publish` what stays."""

    def __init__(
        self, layers: int, kv_heads: int, *, budget: int, history: int = 400, recent: int = 10,
        drop_ratio: float = 0.5, group: str = "mean", unit: str = "head", variant: str = "paper",
        protect: Sequence[int] = (), grace: int = 0,
    ) -> None:  # fmt: skip
        self.budget, self.history, self.recent, self.drop_rows = budget, history, recent, int(drop_ratio * budget)
        self.group, self.unit, self.variant, self.protect, self.grace = group, unit, variant, set(protect), grace
        self.tokens = 0
        self.owners = [[Owner() for _ in range(kv_heads)] for _ in range(layers)]

    def append(self, queries_LQTD: Array, keys_LHTD: Array) -> None:
        """Feed one forward, token by token: append a row, attend over the held rows, note the bits."""
        for at in range(keys_LHTD.shape[2]):
            for layer, owners in enumerate(self.owners):
                mine = queries_LQTD.shape[1] // len(owners)
                for head, owner in enumerate(owners):
                    owner.rows.append(self.tokens)
                    owner.keys.append(keys_LHTD[layer, head, at])
                    self._note(owner, queries_LQTD[layer, head * mine : (head + 1) * mine, at])
            self.tokens += 1

    def _note(self, owner: Owner, queries_GD: Array) -> None:
        seen = []
        for query in queries_GD:
            logits = np.array(owner.keys) @ query / np.sqrt(len(query))
            weights = np.exp(logits - logits.max())
            seen.append(weights / weights.sum())
        attention = GROUP[self.group](np.array(seen), axis=0)
        limit = threshold(list(attention), self.variant)
        near = [abs(a - limit) < 1e-6 * limit for a in attention]
        if len(owner.rows) == 1 or (self.variant == "reference" and sum(near) == 1):
            near = [False] * len(near)
        owner.low.append({t: int(a < limit) for t, a in zip(owner.rows, attention, strict=True)})
        owner.unsure.append({t: int(n) for t, n in zip(owner.rows, near, strict=True)})

    def counts(self, layer: int, head: int, of: str = "low") -> dict[int, int]:
        """Return the counts that decide for one owner; summed where owners share one set (a mean ranks the same)."""
        sharing = {
            "head": [self.owners[layer][head]],
            "pair": [owners[head] for owners in self.owners[layer - layer % 2 : layer - layer % 2 + 2]],
            "layer": self.owners[layer],
            "token": [owner for owners in self.owners for owner in owners],
        }[self.unit]
        each = [low_counts(getattr(owner, of)[-self.history :], owner.rows) for owner in sharing]
        return {t: sum(counts[t] for counts in each) for t in sharing[0].rows}

    def always(self, rows: Sequence[int]) -> list[int]:
        """Return the rows that are never dropped: the newest, the young, the protected."""
        newest = rows[len(rows) - self.recent :] if self.recent < len(rows) else rows
        newest = newest if self.recent else []
        return [t for t in rows if t in newest or self.tokens - 1 - t < self.grace or t in self.protect]

    def choose(self) -> Kept:
        """Return what should be published now."""
        return [
            [
                remaining(o.rows, self.counts(i, h), self.always(o.rows), self.budget, self.drop_rows)
                for h, o in enumerate(owners)
            ]
            for i, owners in enumerate(self.owners)
        ]

    def excuses(self, kept: Kept) -> bool:
        """Whether another set differs from `choose` only by bits that are too close to tell."""
        for layer, heads in enumerate(self.choose()):
            for head, expected in enumerate(heads):
                other = set(expected) ^ set(kept[layer][head])
                never = set(self.always(self.owners[layer][head].rows))
                if len(kept[layer][head]) != len(expected) or other & never:
                    return False
                counts, unsure = self.counts(layer, head), self.counts(layer, head, "unsure")
                if other and max(counts[t] for t in other) - min(counts[t] for t in other) > max(
                    unsure[a] + unsure[b] for a in other for b in other if a != b
                ):
                    return False
                if other and not any(unsure[t] for t in other):
                    return False
        return True

    def publish(self, kept: Kept) -> None:
        """Drop, for good, every row that is not in `kept`."""
        for layer, owners in enumerate(self.owners):
            for head, owner in enumerate(owners):
                stay = [at for at, token in enumerate(owner.rows) if token in kept[layer][head]]
                owner.rows = [owner.rows[at] for at in stay]
                owner.keys = [owner.keys[at] for at in stay]
                owner.low, owner.unsure = owner.low[-self.history :], owner.unsure[-self.history :]
