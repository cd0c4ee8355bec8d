"""Which share of the numbers in a prediction is the right one, as LongBench (arXiv:2308.14508) measures it."""

from __future__ import annotations

import re

from ...errors import ConfigError

__all__ = ["count", "retrieval", "retrieval_zh"]

_NUMBER = re.compile(r"\d+")


def count(prediction: str, gold: str) -> float:
    """Share of the numbers in the prediction that equal the gold number; 0 without any.

    Numbers are compared as they are written: "10" is no "1", and "01" is none either.
    """
    numbers = _NUMBER.findall(prediction)
    return numbers.count(gold) / len(numbers) if numbers else 0.0


def retrieval(prediction: str, gold: str) -> float:
    """The same with the number of a gold answer such as "Paragraph 7".

    Raises:
        ConfigError: the gold answer names no paragraph.
    """
    return _named(prediction, gold, r"Paragraph (\d+)")


def retrieval_zh(prediction: str, gold: str) -> float:
    """The same with the number of a Chinese gold answer.

    Raises:
        ConfigError: the gold answer names no paragraph.
    """
    return _named(prediction, gold, r"段落(\d+)")


def _named(prediction: str, gold: str, pattern: str) -> float:
    found = re.search(pattern, gold)
    if found is None:
        raise ConfigError(f"The answer {gold!r} does not match {pattern!r}: it names no paragraph. Correct the data.")
    return count(prediction, found[1])
