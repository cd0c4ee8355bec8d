"""Mean negative log-likelihood of gold answers, and the perplexity that goes with it."""

from __future__ import annotations

import math
from typing import Any

from ..extras import require

__all__ = ["AnswerNLL"]

evaluate: Any = require("evaluate", "The metric answer_nll")
datasets: Any = require("datasets", "The metric answer_nll")

_DESCRIPTION = "Negative log-likelihood of gold answers in nats per token, weighted by tokens and by examples."


class AnswerNLL(evaluate.Metric):  # type: ignore[misc]
    """`compute(predictions=[nats per token], references=[tokens of that answer])`.

    `answer_nll` weighs every example alike; `token_nll` and `perplexity` weigh every token alike.
    """

    def _info(self) -> Any:
        features = datasets.Features({"predictions": datasets.Value("float64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(
            description=_DESCRIPTION, citation="", inputs_description=AnswerNLL.__doc__, features=features
        )

    def _compute(self, predictions: list[float], references: list[int]) -> dict[str, float]:
        nats = sum(nll * tokens for nll, tokens in zip(predictions, references, strict=True))
        token_nll = nats / sum(references)
        return {
            "answer_nll": sum(predictions) / len(predictions),
            "token_nll": token_nll,
            "perplexity": math.exp(token_nll),
        }
