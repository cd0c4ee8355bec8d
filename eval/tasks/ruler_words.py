"""RULER's two counting tasks (Hsieh et al. 2024, arXiv:2404.06654): common words and frequent coded words.

Parameters are the published ones, including the smaller ones of common words below 4096 tokens.
Deviations: the wording is ours unless `templates` names a RULER checkout; words come from `wonderwords` alone, which
    fill about 100,000 tokens of common words.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass

from .base import Example, ExampleRequest, Sizer, TaskEntry
from .keys import plain_words
from .ruler_text import TEMPLATE_PARAM, PromptParts, RulerWording, wording_of
from .sizing import SizedTask

__all__ = ["ENTRIES", "CommonWordsTask", "FrequentWordsTask", "zipf_counts"]

_SHORT_TOKENS = 4096
_NUM_COMMON = 10
# Words of the worked example, which has 20 of them below 4096 tokens.
_MOST_SHOWN = 40
_ALPHA = 2.0
_CODED_LETTERS = 6
# From here on the fifth coded word is rarer than the fourth.
_FEWEST_CODED = 60


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """All words in an order by chance: common ones first, then those of the worked example, then the others."""

    words: tuple[str, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonWordsTask(SizedTask):
    """The ten words that a numbered list repeats most."""

    wording: RulerWording
    metric: str = "string_match_all"
    max_new_tokens: int = 120

    @property
    def provenance(self) -> Mapping[str, str]:
        """Word list and wording."""
        return {"words": "wonderwords", "num_words": str(len(plain_words())), **self.wording.provenance}

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Words:
        """An order of all words."""
        return _Words(words=tuple(rng.sample(plain_words(), len(plain_words()))), seed=rng.getrandbits(32))

    def unit_bounds(self, draw: _Words) -> tuple[int, int | None]:
        """Uncommon words: at least one, at most all that are left."""
        return 1, len(draw.words) - _MOST_SHOWN - _NUM_COMMON

    def compose(self, draw: _Words, units: int, request: ExampleRequest) -> Example:
        """A worked example with other words, then the list."""
        short = request.length_tokens < _SHORT_TOKENS
        example_words, example_counts, counts = (20, (3, 1), (6, 1)) if short else (_MOST_SHOWN, (10, 3), (30, 3))
        shown, rest = draw.words[:example_words], draw.words[_MOST_SHOWN:]
        example, answer = self._parts(shown, example_counts, draw.seed), rest[:_NUM_COMMON]
        asked = self._parts(rest[: _NUM_COMMON + units], counts, draw.seed)
        solved = f"{example['context']}{example['joint']}{example['question']} {example['answer_prefix']}"
        asked["context"] = f"{solved} {_numbered(shown[:_NUM_COMMON])}\n\n{asked['context']}"
        return Example(
            **asked, answers=answer, gold=_numbered(answer), coordinates={"length_tokens": request.length_tokens}
        )

    def _parts(self, words: tuple[str, ...], counts: tuple[int, int], seed: int) -> PromptParts:
        listed = list(words[:_NUM_COMMON]) * counts[0] + list(words[_NUM_COMMON:]) * counts[1]
        random.Random(seed).shuffle(listed)
        return self.wording.templates["common_words_extraction"].parts(_numbered(listed), query="")


@dataclass(frozen=True, slots=True, kw_only=True)
class FrequentWordsTask(SizedTask):
    """The three most frequent coded words of a text whose counts fall with the square of the rank."""

    wording: RulerWording
    metric: str = "string_match_all"
    max_new_tokens: int = 50

    @property
    def provenance(self) -> Mapping[str, str]:
        """Whose wording it is."""
        return {"words": "made up by chance", **self.wording.provenance}

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Words:
        """Coded words by rank; the first is noise."""
        size = max(request.length_tokens // 50, 5)
        words: dict[str, None] = {"...": None}
        while len(words) < size:  # 26 ** 6 words: a second draw of the same one is rare
            words["".join(rng.choices(string.ascii_lowercase, k=_CODED_LETTERS))] = None
        return _Words(words=tuple(words), seed=rng.getrandbits(32))

    def unit_bounds(self, draw: _Words) -> tuple[int, int | None]:
        """Words before rounding down: enough that the answer is the only right one."""
        return _FEWEST_CODED, None

    def compose(self, draw: _Words, units: int, request: ExampleRequest) -> Example:
        """The coded words in an order by chance."""
        counts = zipf_counts(units, len(draw.words))
        text = [word for word, count in zip(draw.words, counts, strict=True) for _ in range(count)]
        random.Random(draw.seed).shuffle(text)
        return Example(
            **self.wording.templates["freq_words_extraction"].parts(" ".join(text), query=""),
            answers=draw.words[1:4],
            gold=" ".join(draw.words[1:4]),
            coordinates={"length_tokens": request.length_tokens},
        )


def zipf_counts(num_words: int, num_ranks: int) -> list[int]:
    """How often each rank occurs: num_words / (rank ** 2 * zeta(2)), rounded down."""
    # The sum of all 1 / rank ** 2 is pi ** 2 / 6.
    zeta = 1.6449340668482264
    return [int(num_words / (rank**_ALPHA * zeta)) for rank in range(1, num_ranks + 1)]


def _numbered(words: tuple[str, ...] | list[str]) -> str:
    return " ".join(f"{number}. {word}" for number, word in enumerate(words, start=1))


ENTRIES: Mapping[str, TaskEntry] = {
    "ruler_cwe": TaskEntry(
        make=lambda name, templates=None: CommonWordsTask(name=name, wording=wording_of(templates)),
        about="the ten most common words of a list",
        params=(TEMPLATE_PARAM,),
    ),
    "ruler_fwe": TaskEntry(
        make=lambda name, templates=None: FrequentWordsTask(name=name, wording=wording_of(templates)),
        about="the three most frequent words of a coded text",
        params=(TEMPLATE_PARAM,),
    ),
}
