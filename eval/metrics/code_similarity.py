"""How alike the first line of generated code and the right next line are, as LongBench (arXiv:2308.14508) measures it.

The published code asks `fuzzywuzzy`, whose number depends on whether python-Levenshtein is installed (difflib gives
another). Here it is the Levenshtein one: 100 times the longest common subsequence's share of both lengths, rounded to
a whole percent, from `rapidfuzz`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from ..extras import require

__all__ = ["code_similarity", "code_similarity_fixed"]

# A line with one of these is taken for a fence or a comment.
_NO_CODE = ("`", "#", "//")


def code_similarity(prediction: str, gold: str) -> float:
    """Similarity to the first line without a fence or comment mark; "" where there is none.

    The published choice of that line takes an empty one behind a comment, and then scores 0; `code_similarity_fixed`
    passes over blank lines.

    Raises:
        ConfigError: rapidfuzz is not installed.
    """
    return _similarity(_first_code_line(prediction.lstrip("\n").split("\n")), gold)


def code_similarity_fixed(prediction: str, gold: str) -> float:
    """The same, but blank lines are passed over.

    Raises:
        ConfigError: rapidfuzz is not installed.
    """
    return _similarity(_first_code_line([line for line in prediction.split("\n") if line.strip()]), gold)


def _first_code_line(lines: list[str]) -> str:
    return next((line for line in lines if not any(mark in line for mark in _NO_CODE)), "")


def _similarity(line: str, gold: str) -> float:
    percent: int = round(_ratio()(line, gold))
    return percent / 100


@lru_cache(maxsize=1)
def _ratio() -> Any:
    return require("rapidfuzz.fuzz", "The metric code_sim", extra="longbench").ratio
