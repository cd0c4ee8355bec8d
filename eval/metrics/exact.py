"""Measures of answers that are one right text: what is reproduced of it, and whether the answer begins with it."""

from __future__ import annotations

from itertools import takewhile

__all__ = ["copied_words", "starts_with"]


def copied_words(prediction: str, gold: str) -> float:
    """Fraction of the words of `gold` that `prediction` reproduces before its first error."""
    expected = gold.split()
    pairs = zip(prediction.split(), expected, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) / len(expected)


def starts_with(prediction: str, answer: str) -> float:
    """1.0 if `prediction` begins with `answer`, case ignored, and the word or number ends there."""
    text, wanted = prediction.strip().lower(), answer.lower()
    if not text.startswith(wanted):
        return 0.0
    rest = text[len(wanted) : len(wanted) + 2]
    goes_on = rest[:1].isalnum() or (rest[:1] in (".", ",") and rest[1:].isdigit() and wanted[-1].isdigit())
    return 0.0 if goes_on else 1.0
