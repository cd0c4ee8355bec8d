"""The state: laziness, and every rejection of 0x01A as its own case (one field mutated)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hf_kvpolicy.contract import (
    BudgetContract,
    Generations,
    KVPolicyState,
    LazyPositions,
    ProtectedRule,
    RecoverabilityContract,
    RepresentationContract,
    omitted_intervals,
    validate_state,
)
from hf_kvpolicy.errors import (
    ConfigError,
    IntegrityError,
    KVPolicyError,
    SelectionError,
    StaleGenerationError,
)

from ._fixtures import GENERATIONS, POSITIONS, manifest, selection_contract, state, with_positions

Mutation = Callable[[KVPolicyState], KVPolicyState]


def _one_set(layer: int, head: int, positions: list[int]) -> Mutation:
    changed = [[list(owner) for owner in row] for row in POSITIONS]
    changed[layer][head] = positions
    return with_positions(changed)


REJECTED: dict[str, tuple[Mutation, type[KVPolicyError], str]] = {
    "manifest digest": (
        lambda s: replace(s, policy_manifest_sha256="0" * 64),
        StaleGenerationError,
        "digest",
    ),
    "policy generation": (lambda s: replace(s, policy_generation=6), StaleGenerationError, "policy"),
    "request generation": (lambda s: replace(s, request_generation=10), StaleGenerationError, "request"),
    "cache generation": (
        lambda s: replace(s, cache_generation=22),
        StaleGenerationError,
        "cache generation 22",
    ),
    "state generation": (
        lambda s: replace(s, state_generation=12),
        StaleGenerationError,
        "state generation 12",
    ),
    "frontier": (lambda s: replace(s, source_committed_frontier=7), StaleGenerationError, "frontier 7"),
    "duplicate": (_one_set(0, 1, [0, 1, 1, 7]), SelectionError, "duplicate positions [1]"),
    "unsorted": (_one_set(1, 0, [0, 4, 3, 7]), SelectionError, "unsorted"),
    "protected missing": (_one_set(1, 1, [0, 2, 6]), SelectionError, "Protected positions [7]"),
    "over budget": (_one_set(0, 0, [0, 2, 4, 5, 7]), SelectionError, "over budget"),
    "out of range": (_one_set(0, 0, [0, 2, 7, 8]), SelectionError, "out of range"),
    "negative": (_one_set(0, 0, [-1, 0, 7]), SelectionError, "out of range"),
    "missing head": (with_positions([POSITIONS[0], POSITIONS[1][:1]]), SelectionError, "owners [2, 1]"),
    "missing layer": (with_positions(POSITIONS[:1]), SelectionError, "2 layers"),
    "protected rows": (
        lambda s: replace(s, protected_original_positions=((0,), (0,))),
        SelectionError,
        "2 batch rows",
    ),
}


def _validate(mutated: KVPolicyState, m: Any = None, **kwargs: Any) -> None:
    validate_state(m or manifest(), mutated, frontier=8, generations=GENERATIONS, **kwargs)


def test_the_fixture_is_valid() -> None:
    _validate(state())


@pytest.mark.parametrize("case", REJECTED)
def test_one_mutated_field_is_rejected(case: str) -> None:
    mutate, error, word = REJECTED[case]
    with pytest.raises(error) as caught:
        _validate(mutate(state()))
    assert word in str(caught.value)


@pytest.mark.parametrize("name", ["request", "cache", "policy", "state"])
def test_a_source_that_moved_on_makes_the_state_stale(name: str) -> None:
    moved = replace(GENERATIONS, **{name: getattr(GENERATIONS, name) + 1})
    with pytest.raises(StaleGenerationError, match=name):
        validate_state(manifest(), state(), frontier=8, generations=moved)


def test_a_stale_state_is_refused_before_its_store_is_read() -> None:
    def unreadable() -> list[list[list[int]]]:
        raise AssertionError("read")

    with pytest.raises(StaleGenerationError):
        _validate(state(positions_source=unreadable, cache_generation=22))


def test_score_order_is_legal_when_declared() -> None:
    m = manifest(selection_contract=selection_contract(ordering="score"))
    _validate(_one_set(1, 0, [4, 0, 7, 3])(state(m)), m)


@pytest.mark.parametrize(
    ("scope", "max_rows", "legal"),
    [("layer", 8, True), ("layer", 7, False), ("cache", 16, True), ("cache", 15, False)],
)
def test_budget_scopes(scope: str, max_rows: int, legal: bool) -> None:
    budget = BudgetContract(declared=4, unit="rows", scope=scope, max_rows=max_rows)
    m = manifest(selection_contract=selection_contract(budget=budget))
    if legal:
        _validate(state(m), m)
    else:
        with pytest.raises(SelectionError, match="over budget"):
            _validate(state(m), m)


def test_owner_budgets_and_tail_rows() -> None:
    _validate(state(), owner_budgets_rows=[[4, 4], [3, 4]], tail_rows=1)
    with pytest.raises(SelectionError, match="Owner 0 of layer 1"):
        _validate(state(), owner_budgets_rows=[[4, 4], [3, 4]])
    with pytest.raises(SelectionError, match="one budget per layer"):
        _validate(state(), owner_budgets_rows=[[4, 4]])
    _validate(_one_set(0, 0, [0, 2, 4, 5, 7])(state()), tail_rows=1)


def test_protection_beyond_the_frontier_is_not_required_yet() -> None:
    _validate(state(protected_original_positions=[[0, 7, 9]]))


def test_protection_by_some_owner() -> None:
    rule = ProtectedRule(positions=[0, 7], scope="some_owner")
    m = manifest(selection_contract=selection_contract(protected=rule))
    _validate(_one_set(1, 1, [0, 2])(state(m)), m)
    with pytest.raises(SelectionError, match="all owners together"):
        _validate(with_positions([[[0], [0]], [[0], [0]]])(state(m)), m)


def test_a_full_cache_that_omits_a_row_is_rejected() -> None:
    m = manifest(
        representation_contract=RepresentationContract(semantic_class="full_cache_exact"),
        recoverability_contract=RecoverabilityContract(omitted="resident_visible"),
        selection_contract=selection_contract(budget=BudgetContract(), protected=ProtectedRule()),
    )
    _validate(with_positions([[range(8)] * 2] * 2)(state(m)), m)
    with pytest.raises(SelectionError, match="omits 1 of 8"):
        _validate(
            with_positions([[range(8), range(7)], [range(8)] * 2])(state(m, protected_original_positions=[[]])),
            m,
        )


@pytest.mark.parametrize(("unit", "word"), [("layer", "layer 0"), ("token", "layer 0")])
def test_shared_units_hold_one_set(unit: str, word: str) -> None:
    m = manifest(selection_contract=selection_contract(unit=unit))
    with pytest.raises(SelectionError, match=word):
        _validate(state(m), m)
    _validate(with_positions([[[0, 2, 7]] * 2] * 2)(state(m)), m)


def test_a_token_unit_differs_between_layers() -> None:
    per_layer = with_positions([[[0, 2, 7]] * 2, [[0, 3, 7]] * 2])
    layer, token = (manifest(selection_contract=selection_contract(unit=u)) for u in ("layer", "token"))
    _validate(per_layer(state(layer)), layer)
    with pytest.raises(SelectionError, match="layer 1"):
        _validate(per_layer(state(token)), token)


def test_every_batch_row_has_its_own_frontier_and_protection() -> None:
    rows = [[[0, 7], [0, 7], [0, 4], [0, 4]], [[0, 7], [0, 7], [0, 3, 4], [0, 4]]]
    padded = state(row_frontiers=[8, 5], protected_original_positions=[[0, 7], [0, 4]], positions_source=lambda: rows)
    _validate(padded)
    assert padded.omitted_interval_summary == (((1, 7),), ((1, 3),))
    with pytest.raises(SelectionError, match=r"batch row 1, head 0 is out of range"):
        _validate(replace(padded, row_frontiers=[8, 4], protected_original_positions=[[0], [0]]))


def test_positions_are_materialised_once_and_frozen() -> None:
    calls: list[int] = []

    def read() -> list[list[list[int]]]:
        calls.append(1)
        return POSITIONS

    s = state(positions_source=read)
    assert not calls
    assert s.selected_original_positions[1][0] == (0, 3, 4, 7)
    assert s.selected_original_positions is s.selected_original_positions
    assert len(calls) == 1
    assert s == state()


def test_a_stale_source_raises_on_every_access_until_read() -> None:
    def stale() -> list[list[list[int]]]:
        raise StaleGenerationError("gone")

    s = state(positions_source=stale)
    for _ in range(2):
        with pytest.raises(StaleGenerationError):
            _ = s.selected_original_positions


def test_one_lazy_source_may_serve_two_records() -> None:
    calls: list[int] = []

    def read() -> list[list[list[int]]]:
        calls.append(1)
        return POSITIONS

    shared = LazyPositions(read)
    first, second = state(positions_source=shared), state(positions_source=shared)
    assert first.selected_original_positions is second.selected_original_positions
    assert len(calls) == 1


def test_a_parent_is_older_and_numbers_are_numbers() -> None:
    with pytest.raises(IntegrityError, match="parent"):
        state(parent_state_generation=11)
    with pytest.raises(ConfigError, match="source_committed_frontier"):
        state(source_committed_frontier=-1)
    assert state(parent_state_generation=None).generations == Generations(request=11, cache=23, policy=7, state=11)


def test_omitted_intervals() -> None:
    assert state().omitted_interval_summary == ((),)
    assert omitted_intervals([[0, 1, 4], [5]], origin=0, stop=8) == ((2, 4), (6, 8))
    assert omitted_intervals([], origin=2, stop=4) == ((2, 4),)
