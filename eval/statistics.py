"""Means with bootstrap intervals, alone and paired."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["SMOKE_BELOW", "Interval", "bootstrap_mean", "paired_difference"]

# Fewer examples than this cannot tell a loss of 15 points from none (power about one half), so they prove
# only that things run.
SMOKE_BELOW = 50
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean with the 2.5 and 97.5 percent quantiles of its bootstrap distribution."""

    mean: float
    low: float
    high: float


def bootstrap_mean(values: Sequence[float], *, seed: int = 0) -> Interval:
    """Mean of `values` with a 95 % percentile bootstrap interval; the same values give the same interval."""
    data = np.asarray(values, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(data), size=(_RESAMPLES, len(data)))
    low, high = np.quantile(data[picks].mean(axis=1), [0.025, 0.975])
    return Interval(mean=float(data.mean()), low=float(low), high=float(high))


def paired_difference(ours: Mapping[str, float], baseline: Mapping[str, float]) -> Interval | None:
    """Interval of `ours - baseline` over the examples both have; None if they share none.

    Pairing removes how hard an example is, which is most of the variance between policies.
    """
    shared = sorted(ours.keys() & baseline.keys())
    return bootstrap_mean([ours[key] - baseline[key] for key in shared]) if shared else None
