"""Metrics on hand-made vectors."""

from __future__ import annotations

import math

import pytest

pytest.importorskip("evaluate")

from hf_kvpolicy.eval.metrics.answer_nll import AnswerNLL
from hf_kvpolicy.eval.metrics.needle_match import NeedleMatch, needle_match


@pytest.mark.parametrize(
    ("prediction", "answers", "score"),
    [
        (" 1234567.", ["1234567"], 1.0),
        ("it is 123456", ["1234567"], 0.0),
        ("", ["1234567"], 0.0),
        ("ONE and two", ["one", "TWO", "three", "four"], 0.5),
        ("a\x00b", ["a\nb"], 1.0),
        ("91234567", ["1234567"], 1.0),  # no word boundaries, as in RULER
    ],
)
def test_needle_match(prediction: str, answers: list[str], score: float) -> None:
    assert needle_match(prediction, answers) == score


def test_needle_match_metric_averages_examples_and_counts_empty_outputs() -> None:
    found = NeedleMatch(keep_in_memory=True).compute(
        predictions=["7", "", "8 9"], references=[["7"], ["7"], ["9", "1"]]
    )
    assert found == {"needle_match": 0.5, "per_example": [1.0, 0.0, 0.5], "empty_outputs": 1}


def test_answer_nll_weighs_examples_and_tokens() -> None:
    found = AnswerNLL(keep_in_memory=True).compute(predictions=[1.0, 2.0], references=[1, 3])
    assert found["answer_nll"] == pytest.approx(1.5)
    assert found["token_nll"] == pytest.approx(1.75)
    assert found["perplexity"] == pytest.approx(math.exp(1.75))
