"""Intervals and tests against published examples, against independent computations, and by their coverage."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

pytest.importorskip("scipy")

from scipy import optimize, stats

from hf_kvpolicy.eval.proportions import mcnemar_exact, tango_interval, tango_statistic, wilson_interval
from hf_kvpolicy.eval.statistics import (
    Difference,
    bootstrap_mean,
    holm,
    mean_interval,
    paired_difference,
    paired_p_value,
    verdict,
)


@pytest.mark.parametrize(
    ("gained", "lost", "n", "level", "interval"),
    [
        # Airway hyper-responsiveness of 21 children before and after a transplant (Bentur et al. 2009), the worked
        # example of Fagerland, Lydersen and Laake (2014), Statistics in Medicine 33:2850.
        (1, 7, 21, 0.95, (-0.517, -0.026)),
        # What R's PropCIs::scoreci.mp gives.
        (28, 25, 618, 0.90, (-0.0148, 0.0247)),
        (48, 41, 549, 0.90, (-0.0157, 0.0414)),
        (38, 48, 200, 0.95, (-0.1405, 0.0412)),
    ],
)
def test_the_score_interval_is_that_of_worked_examples(
    gained: int, lost: int, n: int, level: float, interval: tuple[float, float]
) -> None:
    digits = len(str(interval[0]).partition(".")[2])
    assert tango_interval(gained, lost, n, level) == pytest.approx(interval, abs=0.5000001 * 10**-digits)


def test_the_score_interval_ends_where_the_test_begins_to_refuse() -> None:
    for gained, lost, n in [(3, 9, 40), (0, 5, 30), (12, 0, 50), (7, 7, 14)]:
        low, high = tango_interval(gained, lost, n)
        assert -1 <= low <= (gained - lost) / n <= high <= 1
        assert [tango_statistic(gained, lost, n, end) for end in (low, high)] == pytest.approx([1.96, -1.96], abs=1e-3)
        mirrored = tango_interval(lost, gained, n)
        assert (-mirrored[1], -mirrored[0]) == pytest.approx((low, high))


@pytest.mark.parametrize(("gained", "lost", "n", "difference"), [(3, 9, 40, 0.1), (0, 5, 30, -0.3), (6, 2, 20, 0.0)])
def test_the_score_statistic_uses_the_most_likely_shares(gained: int, lost: int, n: int, difference: float) -> None:
    """The restricted shares are found again by searching for the greatest multinomial likelihood."""

    def surprise(share_lost: float) -> float:
        shares = (share_lost + difference, share_lost, 1 - 2 * share_lost - difference)
        counts = (gained, lost, n - gained - lost)
        return -sum(count * math.log(max(share, 1e-300)) for count, share in zip(counts, shares, strict=True))

    bounds = (max(0.0, -difference) + 1e-9, (1 - difference) / 2 - 1e-9)
    share_lost = optimize.minimize_scalar(surprise, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    variance = n * (2 * share_lost + difference - difference**2)
    expected = (gained - lost - n * difference) / math.sqrt(variance)
    assert tango_statistic(gained, lost, n, difference) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("n", [1, 5, 20, 100])
def test_equal_answers_have_a_width_that_shrinks_with_n(n: int) -> None:
    """Without a pair that differs the ends are z^2 / (n + z^2)."""
    end = 3.8415 / (n + 3.8415)
    assert tango_interval(0, 0, n) == pytest.approx((-end, end), abs=1e-4)
    assert tango_interval(n, 0, n)[1] == 1.0
    assert tango_interval(0, n, n)[0] == -1.0


@pytest.mark.parametrize(("gain", "loss"), [(0.02, 0.15), (0.1, 0.1), (0.05, 0.4), (0.0, 0.1)])
def test_the_score_interval_covers_the_true_difference(gain: float, loss: float) -> None:
    """Coverage at n = 20 by adding up every outcome's probability, not by drawing."""
    n, covered = 20, 0.0
    for gained, lost in itertools.product(range(n + 1), repeat=2):
        if gained + lost <= n:
            low, high = tango_interval(gained, lost, n)
            chance = stats.multinomial.pmf([gained, lost, n - gained - lost], n, [gain, loss, 1 - gain - loss])
            covered += float(chance) * (low <= gain - loss <= high)
    assert covered > 0.94


def test_shares_of_one_sample() -> None:
    """20 of 20 is [0.839, 1] by hand: n / (n + z^2)."""
    assert wilson_interval(20, 20) == pytest.approx((20 / 23.8415, 1.0), abs=1e-4)
    assert mean_interval([1.0] * 20).low == pytest.approx(20 / 23.8415, abs=1e-4)
    assert mean_interval([0.5] * 20).low == 0.5


def test_mcnemar_counts_only_pairs_that_differ() -> None:
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(0, 4) == pytest.approx(2 * 0.5**4)
    # 1 of 8 or as uneven: 2 (1 + 8) / 256.
    assert mcnemar_exact(1, 7) == pytest.approx(0.0703125)


def test_holm_multiplies_the_smallest_most_and_never_falls() -> None:
    # The example of Holm's procedure with p = 0.01, 0.04, 0.03, 0.005.
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_bootstrap_is_repeatable_and_brackets_the_mean() -> None:
    values = [0.0, 1.0] * 50
    interval = bootstrap_mean(values)
    assert interval == bootstrap_mean(values)
    assert interval.mean == 0.5
    # The normal approximation gives 0.5 -+ 1.96 * 0.05.
    assert (interval.low, interval.high) == pytest.approx((0.40, 0.60), abs=0.02)


@pytest.mark.parametrize("values", [[0.3], [0.3] * 5, [0.1 + 0.2, 0.3, 0.3]])
def test_values_that_do_not_vary_have_an_interval_of_no_width(values: list[float]) -> None:
    interval = bootstrap_mean(values)
    assert interval.low == interval.high == interval.mean == pytest.approx(0.3)


@pytest.mark.parametrize("values", [[0.0, 1.0], [0.0, 0.0, 0.5], [0.0] * 19 + [0.3], [1e-9, 0.0], [5.0, 5.0, 5.1]])
def test_few_and_lopsided_values_have_an_interval(values: list[float]) -> None:
    interval = bootstrap_mean(values)
    assert min(values) <= interval.low <= interval.high <= max(values)
    assert interval.low <= interval.mean


def test_the_bootstrap_covers_a_skewed_mean() -> None:
    """300 samples of 40 draws; a 95 % interval of so few skewed draws covers about 91 %."""
    random = np.random.default_rng(3)
    found = [bootstrap_mean(random.exponential(1.0, 40)) for _ in range(300)]
    assert 0.88 < sum(interval.low <= 1.0 <= interval.high for interval in found) / 300 < 0.99


def test_paired_difference_uses_shared_examples_only() -> None:
    difference = paired_difference({"a": 1.0, "b": 2.0, "c": 9.0}, {"a": 0.0, "b": 1.0, "d": 5.0})
    assert difference == Difference(mean=1.0, low=1.0, high=1.0, n=2)
    assert paired_difference({"a": 1.0}, {"b": 1.0}) is None


def test_scores_that_are_right_or_wrong_have_the_score_interval() -> None:
    ours = {str(i): float(i < 2) for i in range(20)}
    theirs = {str(i): float(i < 8) for i in range(20)}
    difference = paired_difference(ours, theirs)
    assert difference is not None
    assert (difference.low, difference.high) == tango_interval(0, 6, 20)
    assert paired_p_value(ours, theirs) == mcnemar_exact(0, 6)


def test_graded_values_are_exchanged_within_their_pairs() -> None:
    """Five differences of one sign: 2 of 32 exchanges are as uneven."""
    ours = {str(i): 1.0 + i / 10 for i in range(5)}
    assert paired_p_value(ours, {str(i): 0.5 for i in range(5)}) == pytest.approx(2 / 32)
    assert paired_p_value(ours, dict(ours)) == 1.0


@pytest.mark.parametrize(
    ("mean", "low", "high", "n", "p", "words"),
    [
        (-0.3, -0.5, -0.1, 20, 0.01, "lower (-0.30 [-0.50, -0.10], n = 20)"),
        (-0.3, -0.5, -0.1, 20, 0.06, "no difference detected (-0.30 [-0.50, -0.10], n = 20)"),
        (0.0, -0.2, 0.2, 20, 1.0, "no difference detected (+0.00 [-0.20, +0.20], n = 20)"),
        (0.01, -0.03, 0.05, 50, 1.0, "indistinguishable within 0.05 (+0.01 [-0.03, +0.05], n = 50)"),
        (0.01, -0.03, 0.05, 49, 1.0, "no difference detected (+0.01 [-0.03, +0.05], n = 49)"),
        (0.03, 0.02, 0.04, 50, 0.001, "indistinguishable within 0.05 (+0.03 [+0.02, +0.04], n = 50)"),
        (0.4, 0.2, 0.6, 20, 0.001, "higher (+0.40 [+0.20, +0.60], n = 20)"),
    ],
)
def test_what_may_be_said(mean: float, low: float, high: float, n: int, p: float, words: str) -> None:
    assert verdict(Difference(mean=mean, low=low, high=high, n=n), adjusted_p=p) == words
