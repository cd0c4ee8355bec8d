"""Means and paired differences with intervals, p-values, and what may be said of them.

Right-or-wrong scores get score intervals and McNemar's exact test; graded scores and likelihoods a bootstrap and a
permutation test. Which of the two decides by the values alone: all are 0 or 1, or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .extras import require
from .proportions import mcnemar_exact, tango_interval, wilson_interval

__all__ = [
    "MARGIN",
    "SMOKE_BELOW",
    "Difference",
    "Interval",
    "bootstrap_mean",
    "holm",
    "mean_interval",
    "paired_difference",
    "paired_p_value",
    "verdict",
]

stats: Any = require("scipy.stats", "Intervals of the evaluation")

# Fewer examples than this cannot tell a loss of 15 points from none (power about one half), so they prove
# only that things run.
SMOKE_BELOW = 50
# Differences within this much of zero are held to be none: 5 points of score, 0.05 nat of likelihood.
MARGIN = 0.05
_RESAMPLES = 2000
_PERMUTATIONS = 9999


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with its 95 % interval."""

    mean: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference(Interval):
    """A mean difference over the `n` examples that both sides have."""

    n: int

    @property
    def supports_absence(self) -> bool:
        """Whether the examples are enough to say that there is nothing; a bootstrap knows only losses it has met."""
        return self.n >= SMOKE_BELOW

    def __str__(self) -> str:
        """Draw it with what it rests on."""
        return f"{self.mean:+.2f} [{self.low:+.2f}, {self.high:+.2f}], n = {self.n}"


def mean_interval(values: Sequence[float]) -> Interval:
    """Mean with Wilson's score interval where every value is 0 or 1, else with a bootstrap interval."""
    if not _are_binary(values):
        return bootstrap_mean(values)
    low, high = wilson_interval(int(sum(values)), len(values))
    return Interval(mean=sum(values) / len(values), low=low, high=high)


def bootstrap_mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of `values` with a 95 % BCa bootstrap interval (Efron 1987); equal values give equal intervals.

    Values that are all alike, and a single one, give an interval of no width: resampling has nothing to vary.
    """
    data = np.asarray(values, dtype=np.float64)
    mean = float(data.mean())
    if np.ptp(data) <= 1e-12 * max(1.0, abs(mean)):
        return Interval(mean=mean, low=mean, high=mean)
    found = stats.bootstrap(
        (data,), np.mean, n_resamples=_RESAMPLES, method="BCa", rng=np.random.default_rng(seed)
    ).confidence_interval
    return Interval(mean=mean, low=float(found.low), high=float(found.high))


def paired_difference(ours: Mapping[str, float], baseline: Mapping[str, float]) -> Difference | None:
    """Interval of `ours - baseline` over the examples both have; None if they share none.

    Pairing removes how hard an example is, which is most of the variance between policies. Right-or-wrong scores have
    Tango's score interval, all others a bootstrap interval.
    """
    first, second = _shared(ours, baseline)
    n = len(first)
    if not n:
        return None
    if _are_binary([*first, *second]):
        gained, lost = _discordant(first, second)
        low, high = tango_interval(gained, lost, n)
        return Difference(mean=(gained - lost) / n, low=low, high=high, n=n)
    found = bootstrap_mean([a - b for a, b in zip(first, second, strict=True)])
    return Difference(mean=found.mean, low=found.low, high=found.high, n=n)


def paired_p_value(ours: Mapping[str, float], baseline: Mapping[str, float]) -> float:
    """Two-sided p of no difference: McNemar's exact test for right-or-wrong scores, else exchanging within pairs.

    The exchange is exact where all of them are few, and otherwise drawn with a fixed seed.
    """
    first, second = _shared(ours, baseline)
    if _are_binary([*first, *second]):
        return mcnemar_exact(*_discordant(first, second))
    # Of one pair alone, either order is as uneven as the other.
    if len(first) < 2 or np.allclose(first, second, rtol=0.0, atol=1e-12):
        return 1.0
    found = stats.permutation_test(
        (np.asarray(first), np.asarray(second)),
        lambda a, b, axis: np.mean(a - b, axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_PERMUTATIONS,
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number, in the order given (Holm 1979): the k-th smallest of m times m - k + 1."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, running = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = running
    return adjusted


def verdict(difference: Difference, *, adjusted_p: float, margin: float = MARGIN) -> str:
    """What may be said: a difference, that there is none to speak of, or neither.

    A difference needs an interval without zero and a p below 0.05 after Holm's adjustment. That none was detected does
    not make two policies alike: for that the whole interval must lie within the margin, and examples must be enough.
    """
    if difference.supports_absence and -margin <= difference.low and difference.high <= margin:
        return f"indistinguishable within {margin:g} ({difference})"
    if adjusted_p < 0.05 and not difference.low <= 0.0 <= difference.high:
        return f"{'higher' if difference.mean > 0 else 'lower'} ({difference})"
    return f"no difference detected ({difference})"


def _shared(ours: Mapping[str, float], baseline: Mapping[str, float]) -> tuple[list[float], list[float]]:
    keys = sorted(ours.keys() & baseline.keys())
    return [ours[key] for key in keys], [baseline[key] for key in keys]


def _are_binary(values: Sequence[float]) -> bool:
    return all(value in (0.0, 1.0) for value in values)


def _discordant(first: Sequence[float], second: Sequence[float]) -> tuple[int, int]:
    """Examples that only the first is right on, and that only the second is."""
    gained = sum(a > b for a, b in zip(first, second, strict=True))
    lost = sum(a < b for a, b in zip(first, second, strict=True))
    return gained, lost
