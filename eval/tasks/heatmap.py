"""The needle heat map: one fact in plain words, at every length and depth, with several needles a cell.

In the manner of the needle-in-a-haystack test (Kamradt 2023), in our own words.
Deviations: the score is whether the fact's payload occurs in the answer, not a judge's opinion; payloads are drawn by
    chance, so that no model can know them; every cell has at least three different needles, because the cell of one
    needle is 0 or 1 and stripes of a map would be noise.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import ConfigError
from .base import Example, ExampleRequest, Sizer, TaskEntry
from .keys import key_words, made_up_words
from .prose import Prose, prose_entries, prose_provenance
from .sizing import SizedTask

__all__ = ["ENTRIES", "NEEDLES_PER_CELL", "HeatMapTask"]

NEEDLES_PER_CELL = 3
_DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
_INSTRUCTION = "Read the text below. A question about it follows."
# Fact without its payload, and the question about it.
_KINDS = (
    ("The best place to rest in {name} is the", "What is the best place to rest in {name}?"),
    (
        "The song that is sung every morning in {name} is called",
        "What is the song sung every morning in {name} called?",
    ),
    ("The ship that sailed from {name} at dawn was named", "What was the ship that sailed from {name} at dawn named?"),
    ("The secret ingredient of the soup of {name} is the", "What is the secret ingredient of the soup of {name}?"),
    ("The prize of the yearly race in {name} is the", "What is the prize of the yearly race in {name}?"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    kind: int
    name: str
    payload: str
    start: int
    depth: float

    @property
    def stem(self) -> str:
        return _KINDS[self.kind][0].format(name=self.name)

    @property
    def needle(self) -> str:
        return f"{self.stem} {self.payload}."


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMapTask(SizedTask):
    """A fact about a place that does not exist, hidden in prose."""

    prose: Prose
    metric: str = "needle_match"
    max_new_tokens: int = 16
    depths: tuple[float, ...] = _DEPTHS

    @property
    def provenance(self) -> Mapping[str, str]:
        """The prose and the words of payloads."""
        return {**prose_provenance(self.prose()), "key_source": key_words().source}

    def check(self, request: ExampleRequest) -> None:
        """Refuse cells with too few needles."""
        fewest = NEEDLES_PER_CELL * len(request.depths)
        if request.num_examples < fewest:
            raise ConfigError(
                f"Task {self.name!r} puts {NEEDLES_PER_CELL} different needles or more into every cell; on "
                f"{len(request.depths)} depths that takes {fewest} examples a length, not {request.num_examples}. Ask "
                "for more examples or fewer depths."
            )

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Draw:
        """The kinds of needles go round with each turn through the depths."""
        adjective, _, noun = key_words().draw(rng, 1)[0].partition("-")
        return _Draw(
            kind=index // len(request.depths) % len(_KINDS),
            name=made_up_words(rng, 1)[0].capitalize(),
            payload=f"{adjective} {noun}",
            start=rng.randrange(len(self.prose().sentences)),
            depth=request.depths[index % len(request.depths)],
        )

    def compose(self, draw: _Draw, units: int, request: ExampleRequest) -> Example:
        """Sentences with the needle between them."""
        filler = self.prose().take(draw.start, units)
        filler.insert(round(draw.depth * units), draw.needle)
        return Example(
            context=f"{_INSTRUCTION}\n\n{' '.join(filler)}",
            question=_KINDS[draw.kind][1].format(name=draw.name),
            answer_prefix=draw.stem,
            answers=(draw.payload,),
            coordinates={"length_tokens": request.length_tokens, "depth_ratio": draw.depth, "needle": draw.kind},
        )

    def evidence(self, draw: _Draw) -> str:
        """The needle."""
        return draw.needle


ENTRIES: Mapping[str, TaskEntry] = prose_entries(
    "niah",
    lambda name, prose: HeatMapTask(name=name, prose=prose),
    "length x depth map of one fact in prose",
    text_param="haystack",
)
