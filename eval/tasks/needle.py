"""Needle retrieval: one fact hidden at a fixed depth of filler text, asked for with a prefix that repeats it.

In the manner of RULER's single-needle and multi-key tasks (Hsieh et al. 2024, arXiv:2404.06654), in our own
words.
Differences: the prose haystack is the Python language reference instead of essays, depths are a fixed grid
    that every policy sees in full, and lengths below what the question needs are refused.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...errors import ConfigError
from .base import DEPTH_GRID, Example, ExampleRequest, Sizer, TaskEntry
from .haystack import Haystack, noise, pydoc_prose
from .keys import key_words, random_value

__all__ = ["ENTRIES", "NeedleTask"]

_INSTRUCTION = "Some access codes are hidden in the text below. Remember them; you will be asked for one later."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    """The random choices of one example, made before its length is known."""

    key: str
    value: str
    distractors: tuple[str, ...]
    distractor_depths: tuple[float, ...]
    start: int
    depth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class NeedleTask:
    """One needle and `num_distractors` needles with other keys in one haystack."""

    name: str
    haystack: Haystack
    num_distractors: int = 0
    metric: str = "needle_match"
    max_new_tokens: int = 16
    depths: tuple[float, ...] = DEPTH_GRID

    @property
    def provenance(self) -> Mapping[str, str]:
        """Haystack name, licence and digest, and where keys come from."""
        return {
            "haystack": self.haystack.name,
            "haystack_licence": self.haystack.licence,
            "haystack_sha256": self.haystack.sha256,
            "key_source": key_words().source,
        }

    def examples(self, request: ExampleRequest, sizer: Sizer) -> list[Example]:
        """Build `num_examples` examples, going round the depth grid.

        Raises:
            ConfigError: the length is too small for the question.
        """
        return [self._example(request, sizer, index) for index in range(request.num_examples)]

    def minimum_length_tokens(self, request: ExampleRequest, sizer: Sizer) -> int:
        """Tokens of this request's longest prompt without any filler, plus the tokens to generate."""
        draws = [self._draw(request, index) for index in range(request.num_examples)]
        return max(self._length(self._compose(draw, 0, request), sizer, request) for draw in draws)

    def _example(self, request: ExampleRequest, sizer: Sizer, index: int) -> Example:
        draw = self._draw(request, index)
        example = self._compose(draw, self._fitting_sentences(draw, request, sizer), request)
        after_needle = example.context.partition(_needle(draw.key, draw.value))[2]
        # How far back the answer lies decides what a recency policy can see, so it is a coordinate of its own.
        coordinates = {**example.coordinates, "distance_tokens": sizer.count(after_needle)}
        return replace(example, coordinates=coordinates)

    def _draw(self, request: ExampleRequest, index: int) -> _Draw:
        # Seeding with a string is stable across processes and Python versions, unlike hash().
        rng = random.Random(f"{request.seed}/{self.name}/{request.length_tokens}/{index}")
        keys = key_words().draw(rng, 1 + self.num_distractors)
        return _Draw(
            key=keys[0],
            value=random_value(rng),
            distractors=tuple(_needle(key, random_value(rng)) for key in keys[1:]),
            distractor_depths=tuple(rng.random() for _ in keys[1:]),
            start=rng.randrange(len(self.haystack.sentences)),
            depth=request.depths[index % len(request.depths)],
        )

    def _fitting_sentences(self, draw: _Draw, request: ExampleRequest, sizer: Sizer) -> int:
        """The number of filler sentences that reaches the length without passing it.

        Counting sentences one by one gives a first guess; joining tokenises a little differently, so the
        guess is lowered until the whole prompt fits. Both loops only count towards an end.
        """
        spare = request.length_tokens - self._length(self._compose(draw, 0, request), sizer, request)
        if spare < 0:
            raise ConfigError(
                f"Task {self.name!r} cannot be built with {request.length_tokens} tokens: the question and "
                f"its needles alone need {self.minimum_length_tokens(request, sizer)}, the "
                f"{request.max_new_tokens} tokens to generate included. Ask for a larger length."
            )
        cycle = [sizer.count(f" {sentence}") for sentence in self.haystack.take(draw.start, self._horizon(spare))]
        count = 0
        while count < len(cycle) and cycle[count] <= spare:
            spare -= cycle[count]
            count += 1
        while self._length(self._compose(draw, count, request), sizer, request) > request.length_tokens:
            count -= 1
        return count

    def _horizon(self, spare_tokens: int) -> int:
        """More sentences than can fit: each has at least four tokens."""
        return spare_tokens // 4 + 1

    def _length(self, example: Example, sizer: Sizer, request: ExampleRequest) -> int:
        return len(sizer.encode(example).token_ids) + request.max_new_tokens

    def _compose(self, draw: _Draw, num_sentences: int, request: ExampleRequest) -> Example:
        filler = self.haystack.take(draw.start, num_sentences)
        placed = [(draw.depth, _needle(draw.key, draw.value))]
        placed += list(zip(draw.distractor_depths, draw.distractors, strict=True))
        # From the deepest to the shallowest, so that earlier insertions do not move later ones.
        for depth, needle in sorted(placed, reverse=True):
            filler.insert(round(depth * num_sentences), needle)
        return Example(
            context=f"{_INSTRUCTION}\n\n{' '.join(filler)}",
            question=f"What is the access code for {draw.key} given in the text above?",
            answer_prefix=f"The access code for {draw.key} is",
            answers=(draw.value,),
            coordinates={"length_tokens": request.length_tokens, "depth_ratio": draw.depth},
        )


def _needle(key: str, value: str) -> str:
    return f"The access code for {key} is {value}."


# The haystack is part of the name: scores on Python's reference are not RULER scores.
ENTRIES: Mapping[str, TaskEntry] = {
    "needle_single_noise": TaskEntry(
        make=lambda name: NeedleTask(name=name, haystack=noise()),
        about="one access code in repeated filler sentences",
    ),
    "needle_single_pydoc": TaskEntry(
        make=lambda name: NeedleTask(name=name, haystack=pydoc_prose()),
        about="one access code in the Python language reference",
    ),
    "needle_multikey_pydoc": TaskEntry(
        make=lambda name: NeedleTask(name=name, haystack=pydoc_prose(), num_distractors=3),
        about="one of four access codes in the Python language reference",
    ),
}
