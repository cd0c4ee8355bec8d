"""Plain oracle of FastGen (Ge et al., arXiv 2310.01801; contract 0x08H), one unpadded sequence, in float64.

After a prompt each head takes the smallest family that recovers enough of the prompt's attention; after every forward a
head holds what its family names, and of the other rows the ones with the highest mean attention per query that saw
them. A dropped row never comes back; its mean is lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
GROUP = {"mean": np.mean, "max": np.max, "sum": np.sum}
# Name, and whether punctuation, the newest and the heaviest rows are kept.
FAMILIES = {
    "special": (False, False, False),
    "special+punctuation": (True, False, False),
    "special+local": (False, True, False),
    "special+punctuation+local": (True, True, False),
    "special+punctuation+heavy": (True, False, True),
    "special+punctuation+heavy+local": (True, True, True),
    "full": (True, True, True),
}
WIDEST = "special+punctuation+heavy+local"


@dataclass
class Owner:
    """Rows of one KV head, by token position."""

    keys: dict[int, Array] = field(default_factory=dict)
    total: dict[int, float] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)
    family: str = "full"

    def mean(self, row: int) -> float:
        return self.total[row] / max(1, self.seen[row])


class FastGen:
    """One sequence: `feed` a forward, then `kept` says what every head holds."""

    def __init__(
        self, layers: int, kv_heads: int, *, recovery: float, budget: int | None = None, heavy_ratio: float = 0.3,
        local_ratio: float = 0.3, sinks: int = 4, protect: Sequence[int] = (), special: Sequence[int] = (),
        punctuation: Sequence[int] = (), group: str = "mean", on_append: str = "recompress",
    ) -> None:  # fmt: skip
        self.recovery, self.cap = recovery, budget
        self.heavy_ratio, self.local_ratio = Fraction(str(heavy_ratio)), Fraction(str(local_ratio))
        self.pinned = set(range(sinks)) | set(protect)
        self.special_ids, self.punctuation_ids = set(special), set(punctuation)
        self.group, self.on_append = group, on_append
        self.ids: list[int] = []
        self.profiled_at = 0
        self.owners = [[Owner() for _ in range(kv_heads)] for _ in range(layers)]

    def feed(self, ids: Sequence[int], queries_LQTD: Array, keys_LHTD: Array) -> None:
        """Append a forward's tokens, attend with each, then choose."""
        first = len(self.ids)
        self.ids += list(ids)
        is_prompt = len(ids) > 1 or not first
        profiles = is_prompt and (self.on_append == "recompress" or not self.profiled_at)
        if profiles:
            self.profiled_at = len(self.ids)
        for layer, owners in enumerate(self.owners):
            group = queries_LQTD.shape[1] // len(owners)
            for head, owner in enumerate(owners):
                mine = queries_LQTD[layer, head * group : (head + 1) * group]
                mass, band = self._attend(owner, first, mine, keys_LHTD[layer, head])
                if profiles:
                    owner.family = self._smallest(owner, mass, band)
                self._drop(owner)

    def kept(self) -> list[list[list[int]]]:
        """Return ascending positions, [layer][KV head]."""
        return [[sorted(owner.keys) for owner in owners] for owners in self.owners]

    def families(self) -> list[list[str]]:
        return [[owner.family for owner in owners] for owners in self.owners]

    def _attend(
        self, owner: Owner, first: int, queries_GTD: Array, keys_TD: Array
    ) -> tuple[dict[int, float], dict[int, float]]:
        """Return, per row, the attention of these queries, and the part of those that have it among their newest."""
        mass: dict[int, float] = {}
        band: dict[int, float] = {}
        for at in range(keys_TD.shape[0]):
            token = first + at
            owner.keys[token], owner.total[token], owner.seen[token] = keys_TD[at], 0.0, 0
            rows = sorted(owner.keys)
            logits = queries_GTD[:, at] @ np.array([owner.keys[r] for r in rows]).T / math.sqrt(keys_TD.shape[1])
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            received = GROUP[self.group](weights / weights.sum(axis=1, keepdims=True), axis=0)
            for row, weight in zip(rows, received.tolist(), strict=True):
                owner.total[row] += weight
                owner.seen[row] += 1
                mass[row] = mass.get(row, 0.0) + weight
                if token - row < self._local():
                    band[row] = band.get(row, 0.0) + weight
        return mass, band

    def _local(self) -> int:
        return max(1, int(self.local_ratio * self.profiled_at))

    def _heavy(self) -> int:
        return math.ceil(self.heavy_ratio * self.profiled_at)

    def _closed(self, owner: Owner, family: str) -> dict[str, list[int]]:
        """Return the rows that a family names, by what they are kept for; each row once, first come."""
        punctuation, local, _ = FAMILIES[family]
        rules = {
            "pinned": lambda row: row in self.pinned,
            "special": lambda row: self.ids[row] in self.special_ids,
            "newest": lambda row: local and row >= len(self.ids) - self._local(),
            "punctuation": lambda row: punctuation and self.ids[row] in self.punctuation_ids,
        }
        found: dict[str, list[int]] = {name: [] for name in rules}
        for row in sorted(owner.keys):
            name = next((name for name, rule in rules.items() if rule(row)), None)
            if name is not None:
                found[name].append(row)
        return found

    def _best_first(self, owner: Owner, rows: Sequence[int]) -> list[int]:
        return sorted(rows, key=lambda row: (-owner.mean(row), row))

    def _rows(self, owner: Owner, family: str) -> list[int]:
        """Return what a family keeps without a cap, the rows that go last first."""
        closed = self._closed(owner, family)
        named = {row for rows in closed.values() for row in rows}
        others = self._best_first(owner, [row for row in owner.keys if row not in named])
        if family != "full":
            others = others[: self._heavy() if FAMILIES[family][2] else 0]
        return [
            *self._best_first(owner, closed["pinned"]),
            *self._best_first(owner, closed["special"]),
            *reversed(closed["newest"]),
            *self._best_first(owner, closed["punctuation"]),
            *others,
        ]

    def _smallest(self, owner: Owner, mass: dict[int, float], band: dict[int, float]) -> str:
        enough = []
        for family, (_, local, _) in FAMILIES.items():
            rows = set(self._rows(owner, family))
            inside = sum(mass.get(row, 0.0) if row in rows else local * band.get(row, 0.0) for row in owner.keys)
            recovered = 1.0 if family == "full" else inside / sum(mass.values())
            if recovered >= self.recovery and (family == "full" or self.recovery < 1):
                enough.append((len(rows), family))
        return min((e for e in enough if self.cap is None or e[0] <= self.cap), default=(0, WIDEST))[1]

    def _drop(self, owner: Owner) -> None:
        stay = set(self._rows(owner, owner.family)[: self.cap])
        for row in [row for row in owner.keys if row not in stay]:
            del owner.keys[row], owner.total[row], owner.seen[row]
