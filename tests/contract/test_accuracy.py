"""Local attention error: the shared denominator of 0x02K and the cancellation counterexample of 0x02L."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.contract import (
    Ratio,
    churn,
    local_error,
    oracle_topk_recall,
    retained_mass,
    selected_output,
    topk_positions,
)
from hf_kvpolicy.errors import SelectionError

P = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
V = torch.tensor([[0.0], [1.0], [0.0], [-3.0]], dtype=torch.float64)


def test_cancellation_counterexample() -> None:
    # The two sets' table is lost; the text says the lower-mass set keeps values that are both zero.
    more, less = local_error(P, V, [0, 1]), local_error(P, V, [0, 2])
    assert more.retained_mass == pytest.approx(0.7)
    assert more.l2_error == pytest.approx(0.3 / 0.7)
    assert less.retained_mass == pytest.approx(0.6)
    assert less.omitted_mass == pytest.approx(0.4)
    assert less.l2_error == pytest.approx(0.0, abs=1e-12)
    assert more.retained_mass > less.retained_mass
    assert more.l2_error > less.l2_error
    assert more.relative_error is None
    assert less.relative_error is None


def test_relative_error_is_none_only_for_a_dense_norm_of_zero() -> None:
    # The printed values cancel up to 5.6e-17 in binary; powers of two cancel exactly.
    p = torch.tensor([0.25, 0.5, 0.125, 0.125])
    v = torch.tensor([[0.0], [1.0], [0.0], [-4.0]])
    assert local_error(p, v, [0, 1]).relative_error is None
    assert local_error(p, v + 1, [0, 1]).relative_error == pytest.approx(2 / 3)
    assert local_error(p, v + 1e-4, [0, 1]).relative_error is not None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**16), size=st.integers(1, 6))
def test_selected_output_equals_attention_over_the_selected_logits(seed: int, size: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, generator=generator, dtype=torch.float64)
    values = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    selected = torch.randperm(6, generator=generator)[:size].tolist()
    expected = logits[selected].softmax(-1) @ values[selected]
    torch.testing.assert_close(selected_output(logits.softmax(-1), values, selected), expected)
    if size == 6:
        assert local_error(logits.softmax(-1), values, selected).l2_error < 1e-12


@pytest.mark.parametrize("selected", [[], [0, 0], [4], [-1]])
def test_malformed_selections_are_refused(selected: list[int]) -> None:
    with pytest.raises(SelectionError, match="at least one row"):
        retained_mass(P, selected)


def test_a_selection_without_mass_has_no_output() -> None:
    with pytest.raises(SelectionError, match="no probability mass"):
        selected_output(torch.tensor([1.0, 0.0]), torch.ones(2, 1), [1])


def test_recall_and_ties() -> None:
    scores = torch.tensor([1.0, 3.0, 2.0, 2.0])
    assert topk_positions(scores, 2) == [1, 2]
    assert oracle_topk_recall(scores, [1, 3], 2) == Ratio(numerator=1, denominator=2)
    assert oracle_topk_recall(scores, [2, 1, 0], 2).value == 1.0
    assert oracle_topk_recall(scores, [1], 0).value is None


def test_churn_keeps_its_denominator() -> None:
    assert churn([0, 1, 4, 5, 6], [0, 1, 3, 4, 5]) == Ratio(numerator=2, denominator=6)
    assert churn([1], [1]).value == 0.0
    assert churn([1], [2]).value == 1.0
    assert churn([], []).value is None
