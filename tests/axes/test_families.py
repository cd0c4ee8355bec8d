"""What FastGen's families keep, which one is enough, and how rows leave by class."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.allocation import FAMILIES, FULL_FAMILY, FamilyRule, HeadMass
from hf_kvpolicy.selection import (
    NEWEST,
    OPEN,
    PINNED,
    PUNCTUATION,
    SPECIAL,
    ProtectedParts,
    are_open,
    class_ranks,
    keep_by_class,
    keep_by_class_reference,
    lowest_rows,
    row_classes,
    weakest_rows,
)

# Ten rows: 0 is special, 3 and 4 are punctuation, 8 and 9 are the newest of two.
RULE = FamilyRule(recovery=0.9, heavy_ratio=0.2, local_ratio=0.2)


def head(mass: list[float], band: list[float] | None = None) -> HeadMass:
    def at(*rows: int) -> torch.Tensor:
        return torch.tensor([row in rows for row in range(10)])

    total = torch.tensor(mass)
    return HeadMass(
        mass_N=total,
        band_N=torch.zeros(10) if band is None else torch.tensor(band),
        mean_N=total,
        always_N=at(0),
        punctuation_N=at(3, 4),
        newest_N=at(8, 9),
    )


def chosen(mass: list[float], band: list[float] | None = None, most: int = 100) -> str:
    return FAMILIES[RULE.choose(head(mass, band), 10, most)].name


@pytest.mark.parametrize(
    ("mass", "band", "name"),
    [
        ([95, 0, 0, 0, 0, 5, 0, 0, 0, 0], None, "special"),
        ([50, 0, 0, 25, 20, 5, 0, 0, 0, 0], None, "special+punctuation"),
        # The newest rows of every query, not of the last one alone: rows 5 to 7 were near their queries once.
        ([10, 0, 0, 0, 0, 30, 30, 20, 5, 5], [0, 0, 0, 0, 0, 30, 30, 20, 5, 5], "special+local"),
        ([10, 0, 0, 40, 0, 20, 10, 10, 5, 5], [0, 0, 0, 0, 0, 20, 10, 10, 5, 5], "special+punctuation+local"),
        ([10, 40, 40, 5, 0, 5, 0, 0, 0, 0], None, "special+punctuation+heavy"),
        ([10, 25, 25, 10, 0, 7, 7, 6, 5, 5], [0, 0, 0, 0, 0, 7, 7, 6, 5, 5], "special+punctuation+heavy+local"),
        ([10] * 10, None, "full"),
    ],
)
def test_the_smallest_family_that_recovers_enough(mass: list[float], band: list[float] | None, name: str) -> None:
    assert chosen(mass, band) == name


def test_a_limit_leaves_only_smaller_families() -> None:
    mass = [10.0, 40, 40, 5, 0, 5, 0, 0, 0, 0]
    assert chosen(mass, most=5) == "special+punctuation+heavy"
    assert chosen(mass, most=4) == "special+punctuation+heavy+local", "nothing is enough: the widest is cut"
    assert chosen([10.0] * 10, most=9) == "special+punctuation+heavy+local"


def test_parts_keep_the_size_of_the_profile() -> None:
    assert (RULE.local_rows(1), RULE.local_rows(14), RULE.heavy_rows(11)) == (1, 2, 3)
    # 0.29 of 100 is 29 rows, whatever the binary fraction says.
    assert FamilyRule(recovery=1, heavy_ratio=0.29, local_ratio=0.29).local_rows(100) == 29
    names = [family.name for family in FAMILIES]
    terms = RULE.terms(names.index("special+local"), 10, 50)
    assert (terms.newest_from, terms.quota_rows, terms.punctuation) == (48, 0, False)
    terms = RULE.terms(names.index("special+punctuation+heavy"), 10, 50)
    assert (terms.newest_from, terms.quota_rows, terms.punctuation) == (50, 2, True)
    assert RULE.terms(FULL_FAMILY, 10, 50).quota_rows is None


def test_a_row_of_several_classes_has_the_first() -> None:
    tokens = torch.arange(6)
    special, punctuation = tokens == 4, (tokens == 1) | (tokens == 5)
    parts = ProtectedParts(sinks=1, protect=(3,), newest_from=4, punctuation=True)
    found = row_classes(tokens, special, punctuation, parts)
    assert found.tolist() == [PINNED, PUNCTUATION, OPEN, PINNED, SPECIAL, NEWEST]
    parts = ProtectedParts(sinks=0, protect=(), newest_from=6, punctuation=False)
    found = row_classes(tokens, special, punctuation, parts)
    assert found.tolist() == [OPEN, OPEN, OPEN, OPEN, SPECIAL, OPEN]


@given(st.integers(0, 4), st.sets(st.integers(0, 30)), st.integers(0, 32), st.booleans(), st.data())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_open_rows_are_those_of_the_last_class(
    sinks: int, protect: set[int], newest_from: int, keeps: bool, data: st.DataObject
) -> None:
    kinds = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=30, max_size=30)))
    parts = ProtectedParts(sinks=sinks, protect=tuple(protect), newest_from=newest_from, punctuation=keeps)
    rows = (torch.arange(30), kinds == 1, kinds == 2)
    assert torch.equal(are_open(*rows, parts), row_classes(*rows, parts) == OPEN)


def test_an_owner_without_a_finite_rank_has_its_newest_row_named() -> None:
    ranks = torch.tensor([0.5, torch.inf, 0.25, 0.25, torch.inf, torch.inf])
    tokens, owner = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([0, 0, 0, 0, 1, 1])
    places, lowest = lowest_rows(ranks, tokens, owner, 2)
    assert (places.tolist(), lowest.tolist()) == ([3, 5], [0.25, torch.inf])


def test_the_newest_rows_compete_by_position() -> None:
    ranks = class_ranks(torch.tensor([0.5, 0.25, 0.75]), torch.tensor([OPEN, NEWEST, NEWEST]), torch.tensor([3, 8, 9]))
    assert ranks.tolist() == [0.5, 8, 9]


OWNER = st.lists(st.tuples(st.integers(PINNED, OPEN), st.integers(0, 4)), min_size=1, max_size=12)


@given(OWNER, st.none() | st.integers(0, 6), st.integers(1, 14))
@settings(deadline=None, max_examples=300, derandomize=True)
def test_keep_by_class_equals_the_plain_search(rows: list[tuple[int, int]], quota: int | None, most: int) -> None:
    classes, ranks = [kind for kind, _ in rows], [float(rank) for _, rank in rows]
    expected = keep_by_class_reference(classes, ranks, quota, most)
    found = keep_by_class(torch.tensor(classes), torch.tensor(ranks), quota, most)
    assert (list(range(len(rows))) if found is None else found.tolist()) == expected


@given(st.lists(OWNER, min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_the_weakest_row_is_the_one_that_a_smaller_limit_drops(
    owners: list[list[tuple[int, int]]], random: Random
) -> None:
    # Rows of an owner lie in any order of their positions.
    orders = [random.sample(range(len(owner)), len(owner)) for owner in owners]
    flat = [(number, at, *owners[number][at]) for number, order in enumerate(orders) for at in order]
    owner_P, tokens_P, classes_P, ranks_P = (torch.tensor(column) for column in zip(*flat, strict=True))
    found = weakest_rows(classes_P.to(torch.int8), ranks_P.float(), tokens_P, owner_P, len(owners))
    for number, owner in enumerate(owners):
        classes, ranks = [kind for kind, _ in owner], [float(rank) for _, rank in owner]
        stay = keep_by_class_reference(classes, ranks, None, len(owner) - 1)
        assert {*range(len(owner))} - {*stay} == {flat[int(found[number])][1]}
        assert flat[int(found[number])][0] == number
