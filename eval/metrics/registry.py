"""Measures of one answer by name: a prediction and its example give a score in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ...errors import ConfigError, did_you_mean
from ..tasks.base import Example
from .classification import classification, classification_fixed
from .code_similarity import code_similarity, code_similarity_fixed
from .exact import copied_words, starts_with
from .needle_match import any_match, needle_match
from .number_match import count, retrieval, retrieval_zh
from .rouge_l import rouge_l, rouge_l_zh
from .token_f1 import qa_f1, qa_f1_zh

__all__ = ["AnswerMetric", "available_metrics", "score_answer"]

AnswerMetric: TypeAlias = "Callable[[str, Example], float]"


def _best(measure: Callable[[str, str], float]) -> AnswerMetric:
    """The measure against the accepted answer that fits best."""
    return lambda prediction, example: max(measure(prediction, gold) for gold in example.answers)


def _label(measure: Callable[..., float]) -> AnswerMetric:
    return lambda prediction, example: max(measure(prediction, gold, example.classes) for gold in example.answers)


def _first_line(metric: AnswerMetric) -> AnswerMetric:
    """The measure of the first line that is not empty: behind few-shot examples a model goes on with another one."""
    return lambda prediction, example: metric(prediction.lstrip("\n").split("\n")[0], example)


_METRICS: Mapping[str, AnswerMetric] = {
    "needle_match": lambda prediction, example: needle_match(prediction, example.answers),
    "qa_f1": _best(qa_f1),
    "qa_f1_zh": _best(qa_f1_zh),
    "qa_f1_first_line": _first_line(_best(qa_f1)),
    "rouge_l": _best(rouge_l),
    "rouge_l_zh": _best(rouge_l_zh),
    "rouge_l_first_line": _first_line(_best(rouge_l)),
    "classification_first_line": _first_line(_label(classification)),
    "classification_first_line_fixed": _first_line(_label(classification_fixed)),
    "retrieval": _best(retrieval),
    "retrieval_zh": _best(retrieval_zh),
    "count": _best(count),
    "code_sim": _best(code_similarity),
    "code_sim_fixed": _best(code_similarity_fixed),
    # RULER's names: all parts of an answer, and any wording of one.
    "string_match_all": lambda prediction, example: needle_match(prediction, example.answers),
    "string_match_part": lambda prediction, example: any_match(prediction, example.answers),
    "copied_words": lambda prediction, example: copied_words(prediction, example.answers[0]),
    "starts_with": lambda prediction, example: starts_with(prediction, example.answers[0]),
}


def available_metrics() -> tuple[str, ...]:
    """Names that `score_answer` accepts."""
    return tuple(_METRICS)


def score_answer(metric: str, prediction: str, example: Example) -> float:
    """Score one prediction, from 0 (worst) to 1.

    Raises:
        ConfigError: there is no such metric, or a package that it needs is not installed.
    """
    if metric not in _METRICS:
        raise ConfigError(
            f"There is no metric {metric!r}; available are {', '.join(_METRICS)}.{did_you_mean(metric, _METRICS)}"
        )
    return _METRICS[metric](prediction, example)
