"""Targets per layer: the pyramid and its released rounding, ZigZagKV's minimum budgets."""

from __future__ import annotations

from fractions import Fraction
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.allocation import (
    apportion,
    minimum_rows_for_mass,
    minimum_rows_for_output,
    pyramid_reference_rows,
    pyramid_reference_total_rows,
    pyramid_targets,
    zigzag_targets,
)
from hf_kvpolicy.errors import BudgetError, ConfigError, SelectionError

thorough = settings(deadline=None, max_examples=300, derandomize=True)


@pytest.mark.parametrize("layers", [1, 2, 3, 28, 32, 80])
@pytest.mark.parametrize("beta", [0.5, 1, 2, 20, 1e6])
def test_a_pyramid_holds_its_total_and_its_ends(layers: int, beta: float) -> None:
    for total in (0, 1, layers, 7 * layers + 3, 2048 * layers):
        targets = pyramid_targets(total, layers, beta)
        assert sum(targets) == total
        assert len(targets) == layers
        if layers > 1:
            assert targets[-1] == Fraction(total, layers) / Fraction(str(beta))
            assert len({above - below for below, above in pairwise(targets)}) == 1


def test_one_layer_gets_everything() -> None:
    assert pyramid_targets(7, 1, 20) == [7]


@pytest.mark.parametrize("layers", [1, 2, 5, 32])
@pytest.mark.parametrize("floor", [1, 9])
@pytest.mark.parametrize("length", [1, 8, 64, 1000])
def test_layers_within_a_prompt_share_the_budget(layers: int, floor: int, length: int) -> None:
    """Over lengths and budgets: exact, or everything when the prompt has no more, or refused below the floors."""
    for budget in (1, layers, 9 * layers, 50 * layers, 1000 * layers):
        for targets in (pyramid_targets(budget, layers, 20), zigzag_targets(range(1, layers + 1), budget, 0)):
            floors, caps = [floor] * layers, [length] * layers
            if budget < layers * min(floor, length):
                with pytest.raises(BudgetError, match=f"at least {layers * min(floor, length)} rows"):
                    apportion(targets, budget, floors, caps)
                continue
            rows = apportion(targets, budget, floors, caps)
            assert sum(rows) == min(budget, layers * length)
            assert all(min(floor, length) <= row <= length for row in rows)


@pytest.mark.parametrize(
    ("budget", "window", "mean", "first", "last"),
    [
        (64, 8, "63.5", None, None),
        (128, 8, "125.5", 234, 17),
        (512, 8, "518", 983, 53),
        (1024, 32, "1005", 1935, 75),
        (2048, 8, "2040.5", 3978, 103),
    ],
)
def test_released_rows_exceed_the_budget(
    budget: int, window: int, mean: str, first: int | None, last: int | None
) -> None:
    """Known means, first and last layers count the chosen rows of 32 layers, without the window."""
    rows = pyramid_reference_rows(budget, window, 20, 32, 8000)
    assert pyramid_reference_total_rows(budget, window, 20, 32, 8000) == 32 * (Fraction(mean) + window)
    assert sum(rows) == pyramid_reference_total_rows(budget, window, 20, 32, 8000) >= 32 * budget
    if first is not None:
        assert (rows[0] - window, rows[-1] - window) == (first, last)
    assert len({above - below for below, above in pairwise(rows)}) == 1


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        (127, [127] * 4),  # shorter than the budget: whole
        (128, [128] * 4),
        (239, [128] * 4),  # below twice the 120 chosen rows: uniform
        (240, [240, 166, 92, 18]),  # 234 do not fit beside the window: from 232 towards 8 in steps of 224 // 3
        (8000, [242, 166, 90, 14]),  # from 234 to 6 in steps of 76
    ],
)
def test_the_three_regimes(tokens: int, rows: list[int]) -> None:
    assert pyramid_reference_rows(128, 8, 20, 4, tokens) == rows


def test_released_rows_fit_every_prompt() -> None:
    for tokens in range(1, 300):
        for window in (0, 8, 31):
            rows = pyramid_reference_rows(32, window, 20, 6, tokens)
            assert all(0 < row <= tokens for row in rows)
            assert rows == sorted(rows, reverse=True)


@pytest.mark.parametrize("beta", [0, -1, 0.49, float("nan"), float("inf")])
def test_slopes_that_starve_the_bottom_are_refused(beta: float) -> None:
    with pytest.raises(ConfigError, match="beta"):
        pyramid_targets(10, 3, beta)


def test_wrong_pyramids_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 layer"):
        pyramid_targets(10, 0, 2)
    with pytest.raises(ConfigError, match="layers=0"):
        pyramid_reference_rows(10, 2, 2, 0, 100)
    for window in (10, -1):
        with pytest.raises(BudgetError, match=f"window of {window} rows"):
            pyramid_reference_rows(10, window, 2, 3, 100)


def smallest_count(attention: list[int], mass: str) -> int:
    needed, held = Fraction(mass) * sum(attention), 0
    for count, value in enumerate(sorted(attention, reverse=True)):
        if held >= needed:
            return count
        held += value
    return len(attention) if held else 0


@given(st.lists(st.lists(st.integers(0, 9), min_size=12, max_size=12), min_size=1, max_size=4))
@thorough
def test_minimum_rows_equal_the_plain_count(heads: list[list[int]]) -> None:
    for mass in ("0.25", "0.5", "0.9", "1"):
        expected = [smallest_count(head, mass) for head in heads]
        batched = torch.tensor(heads, dtype=torch.float32)
        assert minimum_rows_for_mass(batched, float(mass)).tolist() == expected
        assert minimum_rows_for_mass(batched[None] / 64, float(mass)).tolist() == [expected]
        assert minimum_rows_for_mass(batched[0], float(mass)).item() == expected[0]


def test_minimum_rows_of_plain_shapes() -> None:
    assert minimum_rows_for_mass(torch.full((10,), 0.1, dtype=torch.float64), 0.85).item() == 9
    assert minimum_rows_for_mass(torch.tensor([0.0, 1.0, 0.0]), 1.0).item() == 1
    assert minimum_rows_for_mass(torch.zeros(3), 0.9).item() == 0


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.integers(0, 8), st.integers(0, 40))
@thorough
def test_zigzag_conserves_the_mean(lmba: list[int], least: int, more: int) -> None:
    lmba[0] += 1
    targets = zigzag_targets(lmba, least + more, least)
    assert sum(targets) == len(lmba) * (least + more)
    assert min(targets) >= least
    assert [targets[i] for i in sorted(range(len(lmba)), key=lambda i: lmba[i])] == sorted(targets)


def test_wrong_minimum_budgets_are_refused() -> None:
    for mass in (0.0, 1.5, float("nan")):
        with pytest.raises(ConfigError, match="share"):
            minimum_rows_for_mass(torch.ones(3), mass)
    for bad in (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, -1.0]), torch.ones(2, 0)):
        with pytest.raises(SelectionError, match="Attention"):
            minimum_rows_for_mass(bad, 0.9)
    for least, mean in ((5, 4), (-1, 4)):
        with pytest.raises(BudgetError, match="minimum"):
            zigzag_targets([1, 2], mean, least)
    for lmba in ([], [0, 0], [3, -1]):
        with pytest.raises(ConfigError, match="lmba"):
            zigzag_targets(lmba, 4, 1)
    with pytest.raises(ConfigError, match="nan"):
        zigzag_targets([float("nan"), 1], 4, 1)


def smallest_output_count(attention: torch.Tensor, values: torch.Tensor, similarity: float) -> int:
    ranked = sorted(range(len(attention)), key=lambda i: (-float(attention[i]), i))
    full = attention @ values
    for count in range(1, len(ranked)):
        kept = ranked[:count]
        if torch.cosine_similarity(attention[kept] @ values[kept], full, dim=0) >= similarity:
            return count
    return len(ranked)


@pytest.mark.parametrize("similarity", [0.5, 0.9, 0.99, 1.0])
def test_minimum_rows_for_output_equal_the_plain_search(similarity: float) -> None:
    torch.manual_seed(0)
    attention = torch.softmax(2 * torch.randn(5, 40, dtype=torch.float64), dim=-1)
    values = torch.randn(5, 40, 3, dtype=torch.float64)
    expected = [smallest_output_count(a, v, similarity) for a, v in zip(attention, values, strict=True)]
    assert minimum_rows_for_output(attention, values, similarity).tolist() == expected


def test_outputs_need_what_their_values_add() -> None:
    attention_HN = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).repeat(3, 1)
    same = [[1.0, 1.0]] * 4
    third_turns = [[1.0, 0.0], [1.0, 0.0], [0.0, 90.0], [0.0, 0.0]]
    cancelling = [[1.0, 0.0], [-1.0, 0.0], [-1.0, 0.0], [5.0, 0.0]]
    counts = minimum_rows_for_output(attention_HN, torch.tensor([same, third_turns, cancelling]), 0.99)
    assert counts.tolist() == [1, 3, 4], "an output of zero resembles nothing: all rows"


def test_wrong_similarities_are_refused() -> None:
    with pytest.raises(ConfigError, match="cosine"):
        minimum_rows_for_output(torch.ones(3, 4), torch.ones(3, 4, 2), 1.5)
    with pytest.raises(SelectionError, match="Attention"):
        minimum_rows_for_output(-torch.ones(3, 4), torch.ones(3, 4, 2), 0.9)
