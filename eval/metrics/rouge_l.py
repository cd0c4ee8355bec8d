"""ROUGE-L as LongBench (Bai et al. 2023, arXiv:2308.14508) measures it: the F of the PyPI package `rouge` 1.0.1.

That is the summary-level measure over *sets* of words: sentences end at ".", words at white space, case counts, and a
word that occurs twice counts once. The package `rouge_score` lower-cases, stems and counts; its numbers are others.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..extras import require
from .segmenting import chinese_words

__all__ = ["rouge_l", "rouge_l_zh"]


def rouge_l(prediction: str, gold: str) -> float:
    """F of the union of longest common subsequences; 0 where the package gives up, as published.

    It gives up on a text without a sentence, and on sentences too long for its recursion.

    Raises:
        ConfigError: the package is not installed.
    """
    rouge = _rouge()
    try:
        return float(rouge.get_scores([prediction], [gold], avg=True)["rouge-l"]["f"])
    except (ValueError, RecursionError):
        return 0.0


def rouge_l_zh(prediction: str, gold: str) -> float:
    """The same over the words that jieba cuts.

    Raises:
        ConfigError: `rouge` or `jieba` is not installed.
    """
    return rouge_l(" ".join(chinese_words(prediction)), " ".join(chinese_words(gold)))


@lru_cache(maxsize=1)
def _rouge() -> Any:
    return require("rouge", "The metric rouge_l", extra="longbench").Rouge(metrics=["rouge-l"])
