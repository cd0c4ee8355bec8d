"""In-context classification with labels that nobody can know: groups of words under names made up by chance.

The number of worked lines follows from the length and is a coordinate.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from .base import Example, ExampleRequest, Sizer, TaskEntry
from .keys import made_up_words
from .sizing import SizedTask

__all__ = ["ENTRIES", "FewShotTask"]

_INSTRUCTION = "Every word below belongs to one of four groups. The name of its group stands behind it."
_GROUPS = (
    "sparrow horse salmon tiger beetle goat falcon rabbit whale donkey lizard turkey monkey otter spider camel",
    "bread cheese apple soup carrot pancake honey rice onion cake lemon butter potato noodle cherry salad",
    "hammer saw drill shovel wrench chisel pliers rake axe ladder screwdriver brush needle scissors file clamp",
    "shirt jacket sock glove scarf trousers hat boot skirt coat belt sweater apron sandal vest cap",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    labels: tuple[str, ...]
    word: str
    label: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FewShotTask(SizedTask):
    """Name the group of a word that is in none of the worked lines."""

    metric: str = "starts_with"
    max_new_tokens: int = 8

    @property
    def provenance(self) -> Mapping[str, str]:
        """The word lists are ours."""
        return {"words": "ours", "labels": "made up by chance"}

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Draw:
        """Names of groups, and a word; the groups are asked for in turn."""
        labels, group = tuple(made_up_words(rng, len(_GROUPS))), index % len(_GROUPS)
        return _Draw(
            labels=labels, word=rng.choice(_GROUPS[group].split()), label=labels[group], seed=rng.getrandbits(32)
        )

    def unit_bounds(self, draw: _Draw) -> tuple[int, int | None]:
        """At least one line a group."""
        return len(_GROUPS), None

    def compose(self, draw: _Draw, units: int, request: ExampleRequest) -> Example:
        """Worked lines: every four have all groups; words come again when all were used."""
        rng, queues = random.Random(draw.seed), [list[str]() for _ in _GROUPS]
        lines: list[str] = []
        for start in range(0, units, len(_GROUPS)):
            block = []
            for group, words in enumerate(_GROUPS):
                if not queues[group]:
                    queues[group] = [word for word in words.split() if word != draw.word]
                    rng.shuffle(queues[group])
                block.append(f"{queues[group].pop()}: {draw.labels[group]}")
            rng.shuffle(block)
            lines += block[: units - start]
        text = "\n".join(lines)
        return Example(
            context=f"{_INSTRUCTION}\n\n{text}",
            question=f"What is the name of the group of the word {draw.word}?",
            answer_prefix=f"{draw.word}:",
            answers=(draw.label,),
            classes=draw.labels,
            coordinates={"length_tokens": request.length_tokens, "shots": units},
        )


ENTRIES: Mapping[str, TaskEntry] = {
    "fewshot_groups": TaskEntry(
        make=lambda name: FewShotTask(name=name),
        about="the made-up name of a word's group, from worked lines; chance is 0.25",
    ),
}
