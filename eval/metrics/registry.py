"""Measures of one answer by name: a prediction and its example give a score in [0, 1]."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from ...errors import ConfigError, did_you_mean
from ..tasks.base import Example
from .needle_match import needle_match

__all__ = ["AnswerMetric", "available_metrics", "score_answer"]

AnswerMetric: TypeAlias = "Callable[[str, Example], float]"

_METRICS: Mapping[str, AnswerMetric] = {
    "needle_match": lambda prediction, example: needle_match(prediction, example.answers),
}


def available_metrics() -> tuple[str, ...]:
    """Names that `score_answer` accepts."""
    return tuple(_METRICS)


def score_answer(metric: str, prediction: str, example: Example) -> float:
    """Score one prediction, from 0 (worst) to 1.

    Raises:
        ConfigError: there is no such metric.
    """
    if metric not in _METRICS:
        raise ConfigError(
            f"There is no metric {metric!r}; available are {', '.join(_METRICS)}.{did_you_mean(metric, _METRICS)}"
        )
    return _METRICS[metric](prediction, example)
