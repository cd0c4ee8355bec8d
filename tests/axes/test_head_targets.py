"""Targets per head: global competition with a safeguard, and a table of importances."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.allocation import (
    apportion,
    global_top_counts,
    global_top_counts_reference,
    head_reference_rows,
    head_reference_total_rows,
    head_targets,
    query_to_kv_importance,
    safeguarded_targets,
)
from hf_kvpolicy.errors import BudgetError, ConfigError, SelectionError

thorough = settings(deadline=None, max_examples=300, derandomize=True)
many_ties = st.lists(st.sampled_from([0.0, 0.25, 0.5, -1.0, 1e30]), max_size=9)


@given(st.lists(many_ties, max_size=5), st.integers(0, 40))
@thorough
def test_counts_equal_the_plain_ranking(scores: list[list[float]], total: int) -> None:
    counts = global_top_counts([torch.tensor(own) for own in scores], total)
    assert counts == global_top_counts_reference(scores, total)
    assert sum(counts) == min(total, sum(map(len, scores)))


def test_equal_scores_go_to_the_first_owner_then_the_first_row() -> None:
    assert global_top_counts([torch.ones(3), torch.ones(3), torch.ones(3)], 4) == [3, 1, 0]
    assert global_top_counts([torch.tensor([1, 2]), torch.tensor([2, 3])], 2) == [1, 1]


def test_scores_that_cannot_compete_are_refused() -> None:
    for bad in (float("nan"), float("-inf")):
        with pytest.raises(SelectionError, match="finite"):
            global_top_counts([torch.ones(2), torch.tensor([bad])], 1)
    with pytest.raises(BudgetError, match="-1 rows"):
        global_top_counts([torch.ones(2)], -1)


@pytest.mark.parametrize("heads", [1, 2, 8])
@pytest.mark.parametrize("alpha", [0, 0.2, 0.75, 0.8, 1])
def test_the_safeguard_lies_between_counts_and_equal_shares(heads: int, alpha: float) -> None:
    torch.manual_seed(heads)
    for length in (1, 7, 40):
        scores = [torch.rand(length) for _ in range(heads)]
        for total in (0, 1, heads, 3 * heads, heads * length):
            counts = global_top_counts(scores, total)
            targets = safeguarded_targets(counts, total, alpha)
            assert sum(targets) == Fraction(str(alpha)) * sum(counts) + (1 - Fraction(str(alpha))) * total
            least = (1 - Fraction(str(alpha))) * Fraction(total, heads)
            assert min(targets) >= least
            rows = apportion(targets, total, [0] * heads, [length] * heads)
            assert sum(rows) == min(total, heads * length)
            assert total > heads * length or all(row >= min(int(least), length) for row in rows)


def test_the_ends_of_the_safeguard() -> None:
    assert safeguarded_targets([6, 0], 6, 0) == [3, 3]
    assert safeguarded_targets([6, 0], 6, 1) == [6, 0]
    # The printed default: one fifth of the counts. The released code's floor = 0.2 is alpha = 0.8.
    assert safeguarded_targets([10, 0], 10, 0.2) == [6, 4]
    assert safeguarded_targets([10, 0], 10, 0.8) == [9, 1]


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_weights_outside_the_unit_interval_are_refused(alpha: float) -> None:
    with pytest.raises(ConfigError, match="alpha"):
        safeguarded_targets([1], 1, alpha)


@given(
    st.lists(st.one_of(st.integers(0, 9), st.floats(0, 1)), min_size=1, max_size=12),
    st.integers(0, 500),
    st.sampled_from([1, 1.005, 1.5, 2, 10]),
)
@thorough
def test_a_table_holds_its_mean_and_its_base(importance: list[float], mean: int, beta: float) -> None:
    importance[0] += 1
    targets = head_targets(importance, mean, beta)
    assert sum(targets) == mean * len(importance)
    assert min(targets) >= mean - mean / Fraction(str(beta))
    assert targets == head_targets([Fraction(str(value)) * 7 for value in importance], mean, beta)


def test_a_larger_beta_pools_less() -> None:
    spread = [targets[0] - targets[1] for targets in (head_targets([3, 1], 100, beta) for beta in (1, 1.5, 10))]
    assert spread == sorted(spread, reverse=True)
    assert spread[0] == 100


@pytest.mark.parametrize("layers", [1, 4, 32])
@pytest.mark.parametrize("heads", [1, 8])
def test_tables_share_a_budget_exactly(layers: int, heads: int) -> None:
    owners = layers * heads
    importance = [(37 * i % 11) / 10 for i in range(1, owners + 1)]
    for mean in (1, 4, 100):
        for length in (1, 50, 1000):
            for floor in (1, 2):
                floors, caps, total = [floor] * owners, [length] * owners, mean * owners
                targets = head_targets(importance, mean, 1.5)
                if mean < min(floor, length):
                    with pytest.raises(BudgetError, match=f"{owners} owners"):
                        apportion(targets, total, floors, caps)
                    continue
                rows = apportion(targets, total, floors, caps)
                assert sum(rows) == min(total, owners * length)
                assert all(min(floor, length) <= row <= length for row in rows)


def test_released_rows_of_a_table() -> None:
    """A base of 120 rows and beta 1.01: 118 of them are pooled, an unimportant head keeps 2, and 8 are the window."""
    rows = head_reference_rows([0.0, 3.0, 1.0, 0.0], 128, 8, 1.01, 8000)
    assert rows == [2 + 8, 2 + 354 + 8, 2 + 118 + 8, 2 + 8]
    assert head_reference_total_rows([0.0, 3.0, 1.0, 0.0], 128, 8, 1.01, 8000) == sum(rows) == 4 * 128
    # Halves round to even, 0.5 and 0.5 to nothing: one row of the budget is lost.
    assert head_reference_rows([1, 1, 4], 2, 1, 1, 100) == [0 + 1, 0 + 1, 2 + 1]
    assert head_reference_total_rows([1, 1, 4], 2, 1, 1, 100) == 3 * 2 - 1


def test_released_rows_never_exceed_the_prompt() -> None:
    assert head_reference_rows([0, 3, 1, 0], 128, 8, 1.01, 200) == [10, 200, 128, 10]
    assert head_reference_rows([0, 3, 1, 0], 128, 8, 1.01, 127) == [127] * 4
    assert head_reference_rows([0, 3, 1, 0], 128, 8, 1.01, 128) == [10, 128, 128, 10]


def test_wrong_tables_are_refused() -> None:
    for importance in ([], [0.0, 0.0], [1.0, -1.0], [float("nan")]):
        with pytest.raises(ConfigError, match="importance"):
            head_targets(importance, 4, 2)
    for beta in (0.5, float("inf")):
        with pytest.raises(ConfigError, match="beta"):
            head_targets([1.0], 4, beta)
        with pytest.raises(ConfigError, match="beta"):
            head_reference_rows([1.0], 4, 2, beta, 10)
    with pytest.raises(BudgetError, match="window of 4 rows"):
        head_reference_rows([1.0], 4, 4, 2, 10)


def test_query_heads_are_summed_for_their_kv_head() -> None:
    assert query_to_kv_importance([0.1, 0.2, 0.3, 0.4, 0, 1], 2) == [Fraction("0.3"), Fraction("0.7"), 1]
    for group_size in (0, 4):
        with pytest.raises(ConfigError, match=f"groups of {group_size}"):
            query_to_kv_importance([1.0] * 6, group_size)
