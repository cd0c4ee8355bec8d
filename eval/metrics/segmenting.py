"""Cutting Chinese text into words with jieba, as LongBench does."""

from __future__ import annotations

import logging
from functools import lru_cache
from typing import Any

from ..extras import require

__all__ = ["chinese_words"]


def chinese_words(text: str) -> list[str]:
    """The words of a text in jieba's accurate mode, punctuation and spaces among them.

    Raises:
        ConfigError: jieba is not installed.
    """
    return list(_segmenter().cut(text, cut_all=False))


@lru_cache(maxsize=1)
def _segmenter() -> Any:
    jieba = require("jieba", "Measuring a Chinese answer", extra="longbench")
    jieba.setLogLevel(logging.WARNING)  # it tells standard error how long its dictionary took
    return jieba
