"""Verbatim text: quoting a sentence from its first words, and copying a passage by its name.

The score is the fraction of the words that are reproduced before the first error. What is to be copied is not repeated
in the instruction: a model continues what it saw last.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError
from .base import DEPTH_GRID, Example, ExampleRequest, Sizer, TaskEntry
from .keys import made_up_words
from .prose import Prose, prose_entries, prose_provenance
from .sizing import SizedTask, largest_fitting

__all__ = ["ENTRIES", "ExactCopyTask", "QuoteTask"]

_QUOTE_INSTRUCTION = "Read the text below."
_QUOTE_QUESTION = "Copy one sentence from the text above exactly as it stands there."
_PREFIX_WORDS = 6
_QUOTED_WORDS = range(14, 25)
_COPY_INSTRUCTION = "Read the passages below. Each has a title."
_PASSAGE_SENTENCES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quote:
    place: int
    prefix: str
    rest: str
    depth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QuoteTask(SizedTask):
    """Continue a sentence of the text from its first six words."""

    prose: Prose
    metric: str = "copied_words"
    max_new_tokens: int = 48
    depths: tuple[float, ...] = DEPTH_GRID

    @property
    def provenance(self) -> Mapping[str, str]:
        """The text."""
        return prose_provenance(self.prose())

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Quote:
        """A sentence that is told by the last two of its first words: nothing else in the text has both."""
        sentences = self.prose().sentences
        start = rng.randrange(len(sentences))
        for place in (*range(start, len(sentences)), *range(start)):
            words = sentences[place].split(" ")
            prefix, clue = " ".join(words[:_PREFIX_WORDS]), " ".join(words[_PREFIX_WORDS - 2 : _PREFIX_WORDS])
            if len(words) in _QUOTED_WORDS and sum(clue in sentence for sentence in sentences) == 1:
                rest = _words_that_fit(words[_PREFIX_WORDS:], request.max_new_tokens, sizer)
                return _Quote(place=place, prefix=prefix, rest=rest, depth=request.depths[index % len(request.depths)])
        raise ConfigError(f"No sentence of {self.prose().name!r} can be told by its first words. Give another text.")

    def unit_bounds(self, draw: _Quote) -> tuple[int, int | None]:
        """The sentences around the one that is asked for."""
        return 0, len(self.prose().sentences) - 1

    def compose(self, draw: _Quote, units: int, request: ExampleRequest) -> Example:
        """The text as it stands, the sentence at its depth."""
        begin = draw.place - round(draw.depth * units)
        return Example(
            context=f"{_QUOTE_INSTRUCTION}\n\n{' '.join(self.prose().take(begin, units + 1))}",
            question=_QUOTE_QUESTION,
            answer_prefix=draw.prefix,
            answers=(draw.rest,),
            coordinates={"length_tokens": request.length_tokens, "depth_ratio": draw.depth},
        )

    def evidence(self, draw: _Quote) -> str:
        """The sentence."""
        return self.prose().sentences[draw.place]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Copy:
    titles: tuple[str, ...]
    start: int
    gold: str
    depth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ExactCopyTask(SizedTask):
    """Copy the one of many passages that has a title."""

    prose: Prose
    metric: str = "copied_words"
    max_new_tokens: int = 64
    depths: tuple[float, ...] = DEPTH_GRID

    @property
    def provenance(self) -> Mapping[str, str]:
        """The text."""
        return prose_provenance(self.prose())

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Copy:
        """Titles that mean nothing, and the passage that is asked for."""
        start = rng.randrange(len(self.prose().sentences))
        words = self._passage(start, 0).split(" ")
        return _Copy(
            titles=tuple(word.capitalize() for word in made_up_words(rng, 60)),
            start=start,
            gold=_words_that_fit(words, request.max_new_tokens, sizer),
            depth=request.depths[index % len(request.depths)],
        )

    def unit_bounds(self, draw: _Copy) -> tuple[int, int | None]:
        """Other passages; none comes twice."""
        return 0, len(self.prose().sentences) // _PASSAGE_SENTENCES - 1

    def compose(self, draw: _Copy, units: int, request: ExampleRequest) -> Example:
        """Passages with titles; the first one drawn is asked for and lies at the depth."""
        passages = [f"{self._title(draw, number)}: {self._passage(draw.start, number)}" for number in range(units + 1)]
        passages.insert(round(draw.depth * units), passages.pop(0))
        text = "\n".join(passages)
        return Example(
            context=f"{_COPY_INSTRUCTION}\n\n{text}",
            question=f"Copy the passage with the title {draw.titles[0]} exactly as it stands above.",
            answer_prefix=f"{draw.titles[0]}:",
            answers=(draw.gold,),
            coordinates={"length_tokens": request.length_tokens, "depth_ratio": draw.depth},
        )

    def evidence(self, draw: _Copy) -> str:
        """The passage."""
        return self._passage(draw.start, 0)

    def _title(self, draw: _Copy, number: int) -> str:
        """Titles go round with a number behind them; the one that is asked for stays alone."""
        if number == 0:
            return draw.titles[0]
        turn, place = divmod(number - 1, len(draw.titles) - 1)
        return f"{draw.titles[1 + place]}{turn + 1 if turn else ''}"

    def _passage(self, start: int, number: int) -> str:
        return " ".join(self.prose().take(start + _PASSAGE_SENTENCES * number, _PASSAGE_SENTENCES))


def _words_that_fit(words: list[str], max_new_tokens: int, sizer: Sizer) -> str:
    """As many of the words as can be generated, at least one."""

    def tokens(count: int) -> int:
        return sizer.count(f" {' '.join(words[:count])}")

    return " ".join(words[: largest_fitting(tokens, max_new_tokens, 1, len(words))])


ENTRIES: Mapping[str, TaskEntry] = {
    **prose_entries(
        "quote",
        lambda name, prose: QuoteTask(name=name, prose=prose),
        "continue a sentence of the text from its first six words",
        text_param="text",
    ),
    **prose_entries(
        "exact_copy",
        lambda name, prose: ExactCopyTask(name=name, prose=prose),
        "copy the passage with a title",
        text_param="text",
    ),
}
