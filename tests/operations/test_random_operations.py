"""Random lives of a cache: integrity, bytes, lengths and row counts are always what a plain model says."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from helpers import case_id
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from life import CASES, OPERATIONS, Life

LIVES = st.lists(
    st.sampled_from([name for name, (weight, _, _) in OPERATIONS.items() for _ in range(weight)]).flatmap(
        lambda name: st.tuples(st.just(name), st.integers(*OPERATIONS[name][1:]), st.integers(0, 5))
    ),
    min_size=6,
    max_size=16,
)


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(operations=LIVES)
def test_random_lives(case: Any, family: str, operations: list[tuple[str, int, int]]) -> None:
    life = Life(case, family)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*two prompt segments follow.*")
        life.apply("feed", 7, 0)
        for operation, number, lane in operations:
            life.apply(operation, number, lane)
