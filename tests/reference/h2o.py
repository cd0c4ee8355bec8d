"""Plain oracle of H2O (Zhang et al., arXiv 2306.14048; contract 0x06E), one unpadded sequence, in float64.

Every query adds its probabilities to the held rows' scores: h[j] += reduce_group(softmax(K q / sqrt(d))[j]), the
softmax running over the rows held then. After a forward the `recent` newest rows stay, then the highest scores, ties to
the lower position, until `budget` rows are kept. A dropped row never comes back; its score is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Kept = list[list[list[int]]]  # [layer][KV head] -> ascending positions
GROUP = {"mean": np.mean, "max": np.max, "sum": np.sum}


@dataclass
class Owner:
    """Rows of one KV head. `slack` bounds how far another arithmetic may move a score."""

    rows: list[int] = field(default_factory=list)
    keys: list[Array] = field(default_factory=list)
    score: Array = field(default_factory=lambda: np.zeros(0))
    slack: Array = field(default_factory=lambda: np.zeros(0))
    # Queries that saw the row while it was held.
    seen: Array = field(default_factory=lambda: np.zeros(0))


def softmax(logits: Array) -> Array:
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def best(rows: Sequence[int], score: dict[int, float], always: Sequence[int], budget: int) -> list[int]:
    """Return the rows that stay: those in `always`, then the highest scores, ties to the lower position."""
    if len(rows) <= budget:
        return sorted(rows)
    stay = [t for t in rows if t in always]
    ranked = sorted((t for t in rows if t not in always), key=lambda t: (-score[t], t))
    return sorted(stay + ranked[: max(0, budget - len(stay))])


class H2O:
    """One sequence: `append` a forward, `choose` what should stay, `publish` what stays."""

    def __init__(
        self, layers: int, kv_heads: int, *, budget: int, recent_ratio: float = 0.5, group: str = "sum",
        unit: str = "head", variant: str = "paper", protect: Sequence[int] = (), normalize: bool = False,
        grace: int = 0, cast: Callable[[Array], Array] = lambda p: p, tolerance: float = 1e-6,
    ) -> None:  # fmt: skip
        """`cast` rounds probabilities to the model's dtype, before they are added; variant="reference" does."""
        self.budget, self.recent = budget, int(recent_ratio * budget)
        self.group, self.unit, self.protect, self.grace, self.normalize = group, unit, set(protect), grace, normalize
        self.cast = cast if variant == "reference" else lambda p: p
        self.tolerance, self.tokens = tolerance, 0
        self.owners = [[Owner() for _ in range(kv_heads)] for _ in range(layers)]

    def append(self, queries_LQTD: Array, keys_LHTD: Array) -> None:
        """Feed one forward, token by token: append a row, attend over the held rows, add to their scores."""
        for at in range(keys_LHTD.shape[2]):
            for layer, owners in enumerate(self.owners):
                mine = queries_LQTD.shape[1] // len(owners)
                for head, owner in enumerate(owners):
                    owner.rows.append(self.tokens)
                    owner.keys.append(keys_LHTD[layer, head, at])
                    for name in ("score", "slack", "seen"):
                        setattr(owner, name, np.append(getattr(owner, name), 0.0))
                    heads = list(range(head * mine, (head + 1) * mine))
                    logits = [
                        np.array(owner.keys) @ queries_LQTD[layer, q, at] / np.sqrt(keys_LHTD.shape[3]) for q in heads
                    ]
                    self._add(owner, self.probabilities(np.array(logits), layer, heads, owner.rows))
            self.tokens += 1

    def probabilities(self, logits_GN: Array, layer: int, query_heads: list[int], rows: list[int]) -> Array:
        """Return what one token's query heads pay to each held row."""
        return np.array([softmax(logits) for logits in logits_GN])

    def _add(self, owner: Owner, seen_GN: Array) -> None:
        reduce, step = GROUP[self.group], self.tolerance / 4
        owner.score += reduce(self.cast(seen_GN), axis=0)
        owner.slack += reduce(self.cast(seen_GN * (1 + step)), axis=0) - reduce(self.cast(seen_GN * (1 - step)), axis=0)
        owner.seen += 1

    def scores(self, layer: int, head: int, of: str = "score") -> dict[int, float]:
        """Return what the rows of one owner compete with."""
        sharing = {
            "head": [self.owners[layer][head]],
            "pair": [owners[head] for owners in self.owners[layer - layer % 2 : layer - layer % 2 + 2]],
            "layer": self.owners[layer],
            "token": [owner for owners in self.owners for owner in owners],
        }[self.unit]
        each = [getattr(owner, of) / (owner.seen if self.normalize else 1) for owner in sharing]
        return dict(zip(sharing[0].rows, np.mean(each, axis=0).tolist(), strict=True))

    def always(self, rows: Sequence[int]) -> list[int]:
        """Return the rows that never compete: the newest, the young, the protected."""
        newest = rows[len(rows) - self.recent :] if self.recent else []
        return [t for t in rows if t in newest or self.tokens - 1 - t < self.grace or t in self.protect]

    def choose(self) -> Kept:
        """Return what should be published now."""
        return [
            [best(o.rows, self.scores(i, h), self.always(o.rows), self.budget) for h, o in enumerate(owners)]
            for i, owners in enumerate(self.owners)
        ]

    def excuses(self, kept: Kept) -> bool:
        """Whether another set differs from `choose` only where scores are too close to tell apart."""
        for layer, heads in enumerate(self.choose()):
            for head, expected in enumerate(heads):
                other = set(expected) ^ set(kept[layer][head])
                never = set(self.always(self.owners[layer][head].rows))
                if len(kept[layer][head]) != len(expected) or other & never:
                    return False
                score, slack = self.scores(layer, head), self.scores(layer, head, "slack")
                if any(abs(score[a] - score[b]) > slack[a] + slack[b] for a in other for b in other):
                    return False
        return True

    def publish(self, kept: Kept) -> None:
        """Drop, for good, every row that is not in `kept`."""
        for layer, owners in enumerate(self.owners):
            for head, owner in enumerate(owners):
                stay = [at for at, token in enumerate(owner.rows) if token in kept[layer][head]]
                owner.rows, owner.keys = [owner.rows[at] for at in stay], [owner.keys[at] for at in stay]
                for name in ("score", "slack", "seen"):
                    setattr(owner, name, getattr(owner, name)[stay])
