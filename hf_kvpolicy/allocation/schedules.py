"""The allocations of the papers as the engine asks for them; the mathematics is in the file of each paper.

Letters: L layers, S stored heads, Q query heads, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor

from .adaptive import global_top_counts, safeguarded_targets
from .apportion import apportion
from .base import UNIFORM, Allocation, Demand, by_layer
from .head_table import head_reference_rows, head_targets
from .pyramid import pyramid_reference_rows, pyramid_targets
from .zigzag import minimum_rows_for_mass, zigzag_targets

__all__ = ["AdaptiveAllocation", "HeadTableAllocation", "PyramidAllocation", "ZigZagAllocation"]


def _layers_to_heads(targets_L: Sequence[Fraction], demand: Demand) -> list[list[int]]:
    """Return whole rows [L][S] for targets of one head of each layer; what an owner cannot fill goes to the others."""
    caps = [cap for layer in demand.caps_LS for cap in layer]
    if all(len(set(layer)) == 1 for layer in demand.caps_LS):
        # Heads of a layer hold alike, so that they stay alike.
        tops = [layer[0] for layer in demand.caps_LS]
        total = demand.total_rows // demand.heads
        rows = apportion(targets_L, total, [0] * demand.layers, tops)
        return [[count] * demand.heads for count in rows]
    targets = [target for target in targets_L for _ in range(demand.heads)]
    return by_layer(apportion(targets, demand.total_rows, [0] * len(caps), caps), demand.heads)


@dataclass(frozen=True, slots=True, kw_only=True)
class PyramidAllocation(Allocation):
    """PyramidKV: fewer rows the higher the layer, in equal steps; the same for all heads of a layer."""

    beta: float
    # The released code's capacities, which add up to more than the budget.
    reference: bool = False
    name: str = "pyramid"

    @property
    def conserves(self) -> bool:  # type: ignore[override]
        """Whether the total is exact: the released schedule's is its own."""
        return not self.reference

    def open_rows(self, demand: Demand, sensitivity_L: Sequence[float] | None) -> list[list[int]]:
        """Return the pyramid, cut at what each owner holds."""
        if not self.reference:
            return _layers_to_heads(pyramid_targets(demand.open_rows * demand.layers, demand.layers, self.beta), demand)
        window, tokens = demand.protected_rows, demand.tokens
        kept = pyramid_reference_rows(demand.mean_rows, window, int(self.beta), demand.layers, tokens)
        return [[min(rows - window, cap) for cap in caps] for rows, caps in zip(kept, demand.caps_LS, strict=True)]

    def describe(self) -> dict[str, Any]:
        """Return the shape."""
        return {"beta": self.beta, "reference": self.reference}


@dataclass(frozen=True, slots=True, kw_only=True)
class ZigZagAllocation(Allocation):
    """ZigZagKV: a floor for every layer, the rest by how many rows hold most of the layer's attention."""

    mass: float
    min_ratio: float
    name: str = "zigzag"
    measures_layers: bool = True

    def sensitivity(self, attention_QN: Tensor) -> float:
        """Return LMBA: the mean over query heads of the rows that hold `mass` of the window's attention."""
        if not attention_QN.shape[-1]:
            return 0.0  # a batch row of pads only holds nothing yet
        return float(minimum_rows_for_mass(attention_QN, self.mass).double().mean())

    def open_rows(self, demand: Demand, sensitivity_L: Sequence[float] | None) -> list[list[int]]:
        """Return rows by sensitivity; equal ones where nothing was measured."""
        if sensitivity_L is None or not any(sensitivity_L):
            return UNIFORM.open_rows(demand, None)
        floor = Fraction(str(self.min_ratio)) * demand.open_rows
        return _layers_to_heads(zigzag_targets(list(sensitivity_L), demand.open_rows, floor), demand)

    def describe(self) -> dict[str, Any]:
        """Return mass and floor."""
        return {"mass": self.mass, "min_ratio": self.min_ratio}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadTableAllocation(Allocation):
    """HeadKV: a common base, and a pool distributed over all (layer, head) by a calibrated table."""

    # Layer-major, one number per stored head.
    importance: tuple[float, ...]
    beta: float
    reference: bool = False
    # What names the table in the manifest.
    source: str = field(default="uniform")
    name: str = "head_table"
    differs_by_head: bool = True

    @property
    def conserves(self) -> bool:  # type: ignore[override]
        """Whether the total is exact: the released rounding's is its own."""
        return not self.reference

    def open_rows(self, demand: Demand, sensitivity_L: Sequence[float] | None) -> list[list[int]]:
        """Return the table's rows; what an owner cannot fill goes to the others."""
        caps = [cap for layer in demand.caps_LS for cap in layer]
        if self.reference:
            window = demand.protected_rows
            kept = head_reference_rows(self.importance, demand.mean_rows, window, self.beta, demand.tokens)
            return by_layer([min(rows - window, cap) for rows, cap in zip(kept, caps, strict=True)], demand.heads)
        targets = head_targets(self.importance, demand.open_rows, self.beta)
        return by_layer(apportion(targets, demand.total_rows, [0] * len(caps), caps), demand.heads)

    def describe(self) -> dict[str, Any]:
        """Return pool and table."""
        return {"beta": self.beta, "reference": self.reference, "source": self.source}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveAllocation(Allocation):
    """Ada-KV: a layer's rows go to its heads by the best scores of all of them, with an equal share as safeguard."""

    alpha: float
    # How layers share the budget before their heads compete.
    layers: Allocation = UNIFORM
    reference: bool = False
    name: str = "adaptive"
    splits_by_score: bool = True
    differs_by_head: bool = True

    @property
    def conserves(self) -> bool:  # type: ignore[override]
        """Whether the total is exact: the released rounding's is its own."""
        return not self.reference and self.layers.conserves

    def open_rows(self, demand: Demand, sensitivity_L: Sequence[float] | None) -> list[list[int]]:
        """Return each layer's rows, all with its first head: `split` distributes their sum."""
        if not self.layers.conserves:
            return self.layers.open_rows(demand, sensitivity_L)
        # Layers share as if each were one owner: what one head cannot fill stays in its layer while the others can.
        pooled = Demand(
            mean_rows=demand.open_rows * demand.heads,
            protected_rows=0,
            candidates_LS=tuple((sum(caps),) for caps in demand.caps_LS),
            tokens=demand.tokens,
        )
        rows = self.layers.open_rows(pooled, sensitivity_L)
        return [[layer[0], *[0] * (demand.heads - 1)] for layer in rows]

    def split(self, rows: int, scores: Sequence[Tensor]) -> list[int]:
        """Return the rows of each head."""
        counts, heads, caps = global_top_counts(scores, rows), len(scores), [score.shape[0] for score in scores]
        if self.reference:
            uniform = 1 - Fraction(str(self.alpha))
            base = int(Fraction(rows, heads) * uniform)
            kept = [round(count * (1 - uniform) + base) for count in counts]
            return [min(count, cap) for count, cap in zip(kept, caps, strict=True)]
        targets = safeguarded_targets(counts, rows, self.alpha)
        return apportion(targets, rows, [0] * heads, caps)

    def describe(self) -> dict[str, Any]:
        """Return the safeguard and the layers' shares."""
        layers = {"name": self.layers.name, **self.layers.describe()}
        return {"alpha": self.alpha, "layers": layers, "reference": self.reference}
