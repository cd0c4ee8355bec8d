"""Delayed references: a fact, then other text for a given distance, then the question.

A policy that keeps sinks and recent rows answers while the fact is recent and cannot afterwards (the distance is a
coordinate). Across turns, the fact was told in an earlier turn and every turn is a moment at which a cache selects.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ...errors import ConfigError
from .base import Example, ExampleRequest, Sizer, TaskEntry, Turn
from .keys import key_words, random_value
from .prose import Prose, prose_entries, prose_provenance
from .sizing import SizedTask, largest_fitting

__all__ = ["ENTRIES", "DelayedReferenceTask", "DelayedTurnsTask"]

_INSTRUCTION = "Read the text below. It names a locker number; you will be asked for it."
_TURN = "Please read this passage:"
_READ = "I have read it."
_NOTED = "I will remember it."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    key: str
    value: str
    start: int
    distance: int
    sentences_after: int = 0

    @property
    def stem(self) -> str:
        return f"The locker number of {self.key} is"

    @property
    def fact(self) -> str:
        return f"{self.stem} {self.value}."

    @property
    def question(self) -> str:
        return f"What is the locker number of {self.key}?"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Delayed(SizedTask):
    """What both kinds share: the prose, the fact, and a grid of distances that every policy sees in full."""

    prose: Prose
    distances: tuple[int, ...]
    metric: str = "needle_match"
    max_new_tokens: int = 16

    @property
    def provenance(self) -> Mapping[str, str]:
        """The prose, where keys come from, and the distances."""
        distances = ", ".join(str(distance) for distance in self.distances)
        return {**prose_provenance(self.prose()), "key_source": key_words().source, "distances": distances}

    def check(self, request: ExampleRequest) -> None:
        """Refuse an uneven use of the distances."""
        if request.num_examples % len(self.distances):
            raise ConfigError(
                f"{request.num_examples} examples on {len(self.distances)} distances give some distances more examples "
                f"than others, which favours some policies. Ask for a multiple of {len(self.distances)}."
            )

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Draw:
        """A key with its value, a place in the prose, and the distance."""
        return _Draw(
            key=key_words().draw(rng, 1)[0],
            value=random_value(rng),
            start=rng.randrange(len(self.prose().sentences)),
            distance=self.distances[index % len(self.distances)],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedReferenceTask(_Delayed):
    """A fact `distance` tokens before the question; text before it fills the length."""

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Draw:
        """The sentences behind the fact are as many as its distance allows."""
        # Not super(): a dataclass with slots is another class than the one that its methods were compiled in.
        draw, prose = _Delayed.draw(self, rng, request, index, sizer), self.prose()

        def distance(count: int) -> int:
            return sizer.count(f" {' '.join(prose.take(draw.start, count))}") if count else 0

        return replace(draw, sentences_after=largest_fitting(distance, draw.distance, 0))

    def compose(self, draw: _Draw, units: int, request: ExampleRequest) -> Example:
        """Sentences, the fact, and the sentences that lie between it and the question."""
        before = self.prose().take(draw.start - units, units)
        after = self.prose().take(draw.start, draw.sentences_after)
        return Example(
            context=f"{_INSTRUCTION}\n\n{' '.join([*before, draw.fact, *after])}",
            question=draw.question,
            answer_prefix=draw.stem,
            answers=(draw.value,),
            coordinates={"length_tokens": request.length_tokens, "distance": draw.distance},
        )

    def evidence(self, draw: _Draw) -> str:
        """The fact."""
        return draw.fact


@dataclass(frozen=True, slots=True, kw_only=True)
class DelayedTurnsTask(_Delayed):
    """A fact told in a turn of its own; `distance` turns of other text lie between it and the question."""

    def compose(self, draw: _Draw, units: int, request: ExampleRequest) -> Example:
        """Always as many turns as the largest distance, so that examples differ in the place of the fact alone."""
        count = max(self.distances)
        sentences = self.prose().take(draw.start, units)
        cuts = [units * turn // count for turn in range(count + 1)] if count else []
        turns = [
            Turn(user=" ".join([_TURN, *sentences[begin:end]]), assistant=_READ)
            for begin, end in itertools.pairwise(cuts)
        ]
        turns.insert(count - draw.distance, Turn(user=f"Please remember this: {draw.fact}", assistant=_NOTED))
        return Example(
            context="",
            joint="",
            question=draw.question,
            answer_prefix=draw.stem,
            answers=(draw.value,),
            earlier_turns=tuple(turns),
            coordinates={"length_tokens": request.length_tokens, "distance_turns": draw.distance},
        )

    def finish(self, example: Example, draw: _Draw, sizer: Sizer) -> Example:
        """The distance in tokens, without those of the chat template."""
        after = example.earlier_turns[len(example.earlier_turns) - draw.distance :]
        tokens = sum(sizer.count(turn.user) + sizer.count(turn.assistant) for turn in after)
        return replace(example, coordinates={**example.coordinates, "distance_tokens": tokens})


def _make(
    kind: type[_Delayed], default: tuple[int, ...], name: str, *, prose: Prose, distances: Any = None
) -> _Delayed:
    grid = default if distances is None else distances
    fits = isinstance(grid, list | tuple) and bool(grid)
    if not fits or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in grid):
        raise ConfigError(f"distances of task {name!r} must be a list of whole numbers from 0; got {distances!r}.")
    if max(grid) == 0:
        raise ConfigError(f"distances of task {name!r} are all 0, which delays nothing. Give a larger one beside it.")
    return kind(name=name, prose=prose, distances=tuple(grid))


ENTRIES: Mapping[str, TaskEntry] = {
    **prose_entries(
        "delayed_reference",
        partial(_make, DelayedReferenceTask, (64, 256, 512)),
        "a fact so many tokens before the question",
        text_param="haystack",
        params=("distances",),
    ),
    **prose_entries(
        "delayed_reference_turns",
        partial(_make, DelayedTurnsTask, (0, 1, 2, 4)),
        "a fact told so many turns before the question",
        text_param="haystack",
        params=("distances",),
    ),
}
