"""F1 over the words of answer and prediction, as LongBench (Bai et al. 2023, arXiv:2308.14508) measures it.

There is no special case for yes, no or "unanswerable": they are words like others, and "yes, it is" is half right.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

from .segmenting import chinese_words

__all__ = ["normalised_words", "normalised_words_zh", "qa_f1", "qa_f1_zh"]

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_DELETE_ASCII = str.maketrans("", "", string.punctuation)

# Blocks of CJK, full-width and typographic punctuation that the published measure deletes. It leaves some out, the
# opening quotation mark U+300A beside its deleted partner U+300B among them; so do these.
_CHINESE_BLOCKS = (
    (0x2013, 0x2014), (0x2018, 0x2019), (0x201B, 0x201F), (0x2026, 0x2027), (0x3001, 0x3003), (0x300B, 0x3011),
    (0x3014, 0x301F), (0x3030, 0x3030), (0x303E, 0x303F), (0xFE4F, 0xFE4F), (0xFF01, 0xFF0D), (0xFF0F, 0xFF0F),
    (0xFF1A, 0xFF20), (0xFF3B, 0xFF40), (0xFF5B, 0xFF64),
)  # fmt: skip
_CHINESE_PUNCTUATION = "".join(chr(code) for first, last in _CHINESE_BLOCKS for code in range(first, last + 1))
_DELETE_CHINESE = str.maketrans("", "", string.punctuation + _CHINESE_PUNCTUATION)


def qa_f1(prediction: str, gold: str) -> float:
    """F1 of lower-cased words without ASCII punctuation and articles, each counted as often as it occurs."""
    return _f1(normalised_words(prediction), normalised_words(gold))


def qa_f1_zh(prediction: str, gold: str) -> float:
    """F1 of the words that jieba cuts, without punctuation.

    Raises:
        ConfigError: jieba is not installed.
    """
    return _f1(normalised_words_zh(prediction), normalised_words_zh(gold))


def normalised_words(text: str) -> list[str]:
    """Words in lower case; punctuation is deleted before articles, so "the-end" is the word "theend"."""
    return _ARTICLES.sub(" ", text.lower().translate(_DELETE_ASCII)).split()


def normalised_words_zh(text: str) -> list[str]:
    """The words that jieba cuts, in lower case, without punctuation and white space; none of them empty.

    Raises:
        ConfigError: jieba is not installed.
    """
    cleaned = ("".join(word.lower().translate(_DELETE_CHINESE).split()) for word in chinese_words(text))
    return [word for word in cleaned if word]


def _f1(predicted: Iterable[str], gold: Iterable[str]) -> float:
    found, wanted = Counter(predicted), Counter(gold)
    shared = (found & wanted).total()
    return 2 * shared / (found.total() + wanted.total()) if shared else 0.0
