"""What a task hands to the runner, and what it is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from ...errors import ConfigError

__all__ = ["Coordinate", "Example", "ExampleRequest", "Sizer", "Task", "to_dataset"]

Coordinate = str | int | float


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question about one context.

    `coordinates` say where in the task's grid it lies (length, depth, ...); they become columns of the
    records.
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    coordinates: Mapping[str, Coordinate] = field(default_factory=dict)

    @property
    def example_id(self) -> str:
        """Digest of everything in the example: equal ids mean equal prompts and answers."""
        payload = json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(payload.encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRequest:
    """One point of a task's grid. `length_tokens` bounds the prompt plus the tokens to generate."""

    length_tokens: int
    depths: tuple[float, ...]
    num_examples: int
    max_new_tokens: int
    seed: int

    def __post_init__(self) -> None:
        """Refuse an uneven use of the depth grid.

        Raises:
            ConfigError: some depths would get more examples than others.
        """
        if self.num_examples % len(self.depths):
            raise ConfigError(
                f"{self.num_examples} examples on {len(self.depths)} depths give some depths more examples than "
                f"others, which favours some policies. Ask for a multiple of {len(self.depths)}."
            )


class Sizer(Protocol):
    """Counts tokens the way the model will see them; `prompting.PromptEncoder` is one."""

    def count(self, text: str) -> int:
        """Tokens of a piece of text, without special tokens."""
        ...

    def encode(self, example: Example) -> Any:
        """The encoded prompt, whose `token_ids` are counted."""
        ...


class Task(Protocol):
    """A named generator: the same request, tokenizer and seed always give the same examples."""

    @property
    def name(self) -> str:
        """The name in sweep files and records."""
        ...

    @property
    def provenance(self) -> Mapping[str, str]:
        """Where its texts come from: sources, licences, digests. Written to the run's record."""
        ...

    def examples(self, request: ExampleRequest, sizer: Sizer) -> list[Example]:
        """Build the examples of one request."""
        ...


def to_dataset(examples: list[Example]) -> Any:
    """The examples as a `datasets.Dataset`: one column a field, one `coordinate_*` column a coordinate.

    Raises:
        ConfigError: the package `datasets` is missing.
    """
    from ..extras import require

    datasets = require("datasets", "A table of examples")
    rows = []
    for example in examples:
        parts = {"example_id": example.example_id, "context": example.context, "question": example.question}
        answer = {"answer_prefix": example.answer_prefix, "answers": list(example.answers)}
        grid = {f"coordinate_{name}": value for name, value in example.coordinates.items()}
        rows.append({**parts, **answer, **grid})
    return datasets.Dataset.from_list(rows)
