"""What an allocation is asked, and the uniform one.

An allocation distributes the rows that compete. Rows that every owner keeps anyway (window, sinks, `protect=`) are
the same for all owners of a batch row; they are inside the budget and are taken off before anything is distributed.

Letters: L layers, S stored heads, N competing rows of one owner, Q query heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .apportion import apportion

__all__ = ["UNIFORM", "Allocation", "Demand", "UniformAllocation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """One batch row's rows to distribute."""

    # Rows per owner that the budget allows in the mean, protected ones inside.
    mean_rows: int
    # Rows that every owner keeps whatever its score.
    protected_rows: int
    # Rows each owner could keep, protected ones inside.
    candidates_LS: tuple[tuple[int, ...], ...]
    # Real tokens fed so far.
    tokens: int

    @property
    def open_rows(self) -> int:
        """Rows per owner, in the mean, that are left for competing rows."""
        return max(0, self.mean_rows - self.protected_rows)

    @property
    def caps_LS(self) -> list[list[int]]:
        """Competing rows of each owner: more cannot be kept."""
        return [[max(0, count - self.protected_rows) for count in layer] for layer in self.candidates_LS]

    @property
    def layers(self) -> int:
        """Layers."""
        return len(self.candidates_LS)

    @property
    def heads(self) -> int:
        """Stored heads per layer."""
        return len(self.candidates_LS[0])

    @property
    def total_rows(self) -> int:
        """Competing rows to keep over all owners: what the budget allows, or all there are."""
        return min(self.open_rows * self.layers * self.heads, sum(map(sum, self.caps_LS)))


class Allocation(ABC):
    """How many competing rows each owner keeps. Stateless; subclasses are frozen dataclasses."""

    name: str
    # Whether every layer's sensitivity must be known before anything is distributed.
    measures_layers: bool = False
    # Whether a layer's rows are distributed over its heads by their scores.
    splits_by_score: bool = False
    # Whether the heads of one layer may end with different numbers of rows.
    differs_by_head: bool = False
    # Whether the total is exactly what was asked for (released schedules round and report their own).
    conserves: bool = True

    @abstractmethod
    def open_rows(self, demand: Demand, sensitivity_L: Sequence[float] | None) -> list[list[int]]:
        """Return the competing rows each owner keeps, [L][S]."""

    def sensitivity(self, attention_QN: Tensor) -> float:
        """Return how much budget one layer needs, from the window's mean attention per query head."""
        raise NotImplementedError(f"{self.name} does not measure layers")

    def split(self, rows: int, scores: Sequence[Tensor]) -> list[int]:
        """Return how many of a layer's rows each head keeps, given the scores of its competing rows."""
        raise NotImplementedError(f"{self.name} does not split a layer by scores")

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return the JSON-able parameters that enter the manifest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UniformAllocation(Allocation):
    """Every owner the same number of rows; what some owners cannot fill goes to the others."""

    name: str = "uniform"

    def open_rows(self, demand: Demand, sensitivity_L: Sequence[float] | None) -> list[list[int]]:
        """Return equal rows."""
        caps = [cap for layer in demand.caps_LS for cap in layer]
        if min(caps) >= demand.open_rows:
            return [[demand.open_rows] * demand.heads for _ in range(demand.layers)]
        rows = apportion([demand.open_rows] * len(caps), demand.total_rows, [0] * len(caps), caps)
        return by_layer(rows, demand.heads)

    def describe(self) -> dict[str, Any]:
        """Return nothing: there is no parameter."""
        return {}


def by_layer(rows: Sequence[int], heads: int) -> list[list[int]]:
    """Return a flat, layer-major list of owners as [L][S]."""
    return [list(rows[begin : begin + heads]) for begin in range(0, len(rows), heads)]


UNIFORM = UniformAllocation()
