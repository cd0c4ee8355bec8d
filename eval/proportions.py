"""Intervals and tests for shares of right answers, alone and paired, that hold at few examples and near 0 and 1.

A bootstrap of twenty right answers out of twenty has no width; these have.
"""

from __future__ import annotations

import math
from typing import Any

from .extras import require

__all__ = ["mcnemar_exact", "tango_interval", "tango_statistic", "wilson_interval"]

stats: Any = require("scipy.stats", "Intervals of the evaluation")
optimize: Any = require("scipy.optimize", "Intervals of the evaluation")


def wilson_interval(right: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Score interval of a share of `right` out of `n` (Wilson 1927)."""
    found = stats.binomtest(right, n).proportion_ci(confidence_level=level, method="wilson")
    return float(found.low), float(found.high)


def tango_statistic(gained: int, lost: int, n: int, difference: float) -> float:
    """Tango's score statistic of the hypothesis that the paired difference of shares is `difference`.

    Args:
        gained: pairs that only the first is right on.
        lost: pairs that only the second is right on.
        n: pairs.
        difference: the share of the first minus that of the second, in (-1, 1).

    Tango (1998), Statistics in Medicine 17:891, eq. (24) and (25), with the sign turned. `share_lost` is the most
    likely share of pairs that only the second is right on, given the difference.
    """
    linear = (2 * n - gained + lost) * difference - (gained + lost)
    constant = -lost * difference * (1 - difference)
    share_lost = (math.sqrt(max(linear**2 - 8 * n * constant, 0.0)) - linear) / (4 * n)
    variance = n * (2 * share_lost + difference * (1 - difference))
    distance = gained - lost - n * difference
    if variance <= 0.0:
        return math.copysign(math.inf, distance) if distance else 0.0
    return distance / math.sqrt(variance)


def tango_interval(gained: int, lost: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Score interval of the paired difference `(gained - lost) / n`: the differences that the test does not refuse."""
    critical, estimate = float(stats.norm.ppf(0.5 + level / 2)), (gained - lost) / n
    edge = 1 - 1e-12  # the statistic is not defined at a difference of -1 and 1

    def above(difference: float) -> float:
        return tango_statistic(gained, lost, n, difference) - critical

    def below(difference: float) -> float:
        return tango_statistic(gained, lost, n, difference) + critical

    # The statistic falls from plus to minus infinity as the difference rises.
    low = -1.0 if above(-edge) <= 0 else float(optimize.brentq(above, -edge, min(estimate, edge)))
    high = 1.0 if below(edge) >= 0 else float(optimize.brentq(below, max(estimate, -edge), edge))
    return low, high


def mcnemar_exact(gained: int, lost: int) -> float:
    """Two-sided p of as uneven a split of the pairs on which the two differ; 1 where there is none (McNemar 1947)."""
    return float(stats.binomtest(gained, gained + lost, 0.5).pvalue) if gained + lost else 1.0
