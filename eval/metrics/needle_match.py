"""Share of the gold answers that occur in an output, lower-cased; RULER's measure for retrieval tasks."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..extras import require

__all__ = ["NeedleMatch", "any_match", "needle_match"]

evaluate: Any = require("evaluate", "The metric needle_match")
datasets: Any = require("datasets", "The metric needle_match")

_CONTROL_CHARACTERS = re.compile(r"[\x00-\x1f]")
_DESCRIPTION = "Fraction of gold strings that occur in the prediction, case ignored, averaged over examples."


def needle_match(prediction: str, answers: Sequence[str]) -> float:
    """Fraction of `answers` found in `prediction`; case ignored, control characters read as line ends.

    There are no word boundaries: "123" is found in "41234". Seven-digit values make that unlikely.
    """
    return sum(_found(prediction, answers)) / len(answers)


def any_match(prediction: str, answers: Sequence[str]) -> float:
    """1.0 if one of `answers` is found in `prediction`, read as above; for answers that are wordings of one."""
    return float(any(_found(prediction, answers)))


def _found(prediction: str, answers: Sequence[str]) -> list[bool]:
    text = _CONTROL_CHARACTERS.sub("\n", prediction.strip()).strip().lower()
    return [answer.lower() in text for answer in answers]


class NeedleMatch(evaluate.Metric):  # type: ignore[misc]
    """`compute(predictions=[text], references=[[gold, ...]])`: mean, per-example scores, empty outputs."""

    def _info(self) -> Any:
        features = datasets.Features(
            {
                "predictions": datasets.Value("string"),
                "references": datasets.Sequence(datasets.Value("string")),
            }
        )
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=NeedleMatch.__doc__, features=features
        )

    def _compute(self, predictions: list[str], references: list[list[str]]) -> dict[str, Any]:
        scores = [needle_match(text, answers) for text, answers in zip(predictions, references, strict=True)]
        empty = sum(not text.strip() for text in predictions)
        return {"needle_match": sum(scores) / len(scores), "per_example": scores, "empty_outputs": empty}
