"""Whole rows from real targets: the exact total, floors and caps, equal to one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.allocation import Number, apportion, apportion_reference
from hf_kvpolicy.errors import BudgetError

thorough = settings(deadline=None, max_examples=250, derandomize=True)


@dataclass(frozen=True)
class Problem:
    """Targets, a total that the floors allow, floors and caps."""

    targets: list[Number]
    total: int
    floors: list[int]
    caps: list[int]

    def solved(self, how: Callable[..., list[int]] = apportion) -> list[int]:
        return how(self.targets, self.total, self.floors, self.caps)


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Few owners, so that ties, floors above caps, bound caps and both directions of repair are common."""
    number: st.SearchStrategy[Number] = st.one_of(
        st.fractions(-3, 40, max_denominator=6),
        st.floats(-3, 40),
        st.integers(-3, 40),
        st.sampled_from([0.5, 1.5, 2.5, 1e9, 0.1]),
    )
    owners = draw(st.integers(1, 7))
    targets = draw(st.lists(number, min_size=owners, max_size=owners))
    floors = draw(st.lists(st.integers(0, 6), min_size=owners, max_size=owners))
    caps = draw(st.lists(st.integers(0, 30), min_size=owners, max_size=owners))
    least = sum(map(min, floors, caps))
    return Problem(targets, draw(st.integers(least, max(least, sum(caps)) + 5)), floors, caps)


@given(problems())
@thorough
def test_equals_one_row_at_a_time(problem: Problem) -> None:
    assert problem.solved() == problem.solved(apportion_reference)


@given(problems())
@thorough
def test_total_floors_and_caps_hold(problem: Problem) -> None:
    rows = problem.solved()
    assert sum(rows) == min(problem.total, sum(problem.caps))
    assert all(row <= cap for row, cap in zip(rows, problem.caps, strict=True))
    assert all(row >= min(*pair) for row, *pair in zip(rows, problem.floors, problem.caps, strict=True))


@given(problems())
@thorough
def test_no_owner_loses_a_row_when_the_total_grows(problem: Problem) -> None:
    more = apportion(problem.targets, problem.total + 1, problem.floors, problem.caps)
    assert all(after >= before for before, after in zip(problem.solved(), more, strict=True))


@given(problems())
@thorough
def test_among_equal_owners_the_first_gets_more(problem: Problem) -> None:
    twins = Problem(problem.targets[:1] * 5, problem.total, problem.floors[:1] * 5, problem.caps[:1] * 5)
    if problem.total < sum(map(min, twins.floors, twins.caps)):
        return
    rows = twins.solved()
    assert rows == sorted(rows, reverse=True)
    assert rows[0] - rows[-1] <= 1


@pytest.mark.parametrize("owners", [1, 2, 31, 1024])
@pytest.mark.parametrize("cap", [1500, 2**40])
def test_large_surpluses_and_large_excesses(owners: int, cap: int) -> None:
    """No exchange is left that would help: the last row given anywhere beats the next row of every other owner."""
    targets = [Fraction(37 * i % 101, 7) ** 3 for i in range(owners)]
    floors, caps = [i % 5 for i in range(owners)], [cap - i for i in range(owners)]
    for total in (sum(floors), sum(floors) + 1, 40 * owners, 900 * owners, sum(caps) - 1, sum(caps)):
        rows = apportion(targets, total, floors, caps)
        assert sum(rows) == total
        given_last = [(targets[i] - rows[i] + 1, -i) for i in range(owners) if rows[i] > floors[i]]
        not_given = [(targets[i] - rows[i], -i) for i in range(owners) if rows[i] < caps[i]]
        if given_last and not_given:
            assert min(given_last) > max(not_given)


def test_a_large_surplus_equals_one_row_at_a_time() -> None:
    targets = [Fraction(i * i, 3) for i in range(24)]
    caps = [60 + 7 * i for i in range(24)]
    for total in range(0, sum(caps) + 1, 397):
        assert apportion(targets, total, [0] * 24, caps) == apportion_reference(targets, total, [0] * 24, caps)


def test_more_than_all_caps_leaves_everybody_full() -> None:
    assert apportion([1, 2, 3], 100, [0, 0, 0], [4, 0, 5]) == [4, 0, 5]
    assert apportion_reference([1, 2, 3], 100, [0, 0, 0], [4, 0, 5]) == [4, 0, 5]


def test_a_floor_above_its_cap_is_lowered_to_it() -> None:
    assert apportion([0, 0, 9], 5, [4, 1, 0], [2, 9, 9]) == [2, 1, 2]


def test_no_owners_hold_no_rows() -> None:
    assert apportion([], 0, [], []) == []


def test_floats_are_the_rationals_they_are() -> None:
    """0.1 lies above one tenth in binary, so it wins over the exact tenth that comes first."""
    assert apportion([Fraction(1, 10), 0.1], 1, [0, 0], [1, 1]) == [0, 1]
    assert apportion([0.1, Fraction(1, 10)], 1, [0, 0], [1, 1]) == [1, 0]


@pytest.mark.parametrize("how", [apportion, apportion_reference])
@pytest.mark.parametrize(
    ("targets", "total", "floors", "caps", "said"),
    [
        ([1, 1], 3, [2, 2], [9, 9], "at least 4 rows"),
        ([1, 1], -1, [0, 0], [9, 9], "-1 rows"),
        ([1], 3, [0, 0], [9, 9], "1 targets, 2 floors and 2 caps"),
        ([float("nan"), 1], 3, [0, 0], [9, 9], "finite"),
        ([float("inf"), 1], 3, [0, 0], [9, 9], "finite"),
        ([1, 1], 3, [-1, 0], [9, 9], "lowest floor is -1"),
        ([1, 1], 3, [0, 0], [9, -9], "lowest cap is -9"),
    ],
)
def test_refusals(
    how: Callable[..., list[int]], targets: object, total: int, floors: object, caps: object, said: str
) -> None:
    with pytest.raises(BudgetError, match=said):
        how(targets, total, floors, caps)
