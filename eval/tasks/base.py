"""What a task hands to the runner, and what it is asked for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Protocol

from ...errors import ConfigError

__all__ = [
    "DEPTH_GRID",
    "LIKELIHOOD",
    "Coordinate",
    "Example",
    "ExampleRequest",
    "Sizer",
    "Task",
    "TaskEntry",
    "Turn",
    "to_dataset",
    "without_context",
]

Coordinate = str | int | float

# Every task that hides something at a depth shows every policy the same depths.
DEPTH_GRID = (0.1, 0.3, 0.5, 0.7, 0.9)
# The measure of a task that generates nothing: exp(-NLL per token) of the gold text, the inverse of its perplexity.
LIKELIHOOD = "likelihood"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange before the question: what the user said and what the assistant is taken to have answered."""

    user: str
    assistant: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One question about one context, and what counts as an answer.

    The user's text is `context + joint + question`. A cache that must not see the question when it selects is fed the
    text up to `joint` first, so everything that names what is asked for belongs into `question`.

    Attributes:
        context: instruction and text.
        question: what is asked, with everything that follows the text; may be empty.
        answer_prefix: beginning of the answer; it follows the assistant header of a chat template.
        answers: accepted answers, or the parts of one; the task's metric says which.
        coordinates: where in the task's grid the example lies (length, depth, ...); columns of the records.
        joint: text between context and question.
        gold: the text whose likelihood is measured; None for the first answer.
        classes: labels that a classification may choose from.
        earlier_turns: exchanges before this one, each fed to the cache as a segment of its own.
        chat_template: whether the prompt goes through the tokenizer's chat template where there is one.
        stop: strings that end an answer besides the end token.
        min_new_tokens: tokens before an end is accepted.
        dropped_tokens: tokens that were cut out of the prompt to make it fit.
    """

    context: str
    question: str
    answer_prefix: str
    answers: tuple[str, ...]
    coordinates: Mapping[str, Coordinate] = field(default_factory=dict)
    joint: str = "\n\n"
    gold: str | None = None
    classes: tuple[str, ...] = ()
    earlier_turns: tuple[Turn, ...] = ()
    chat_template: bool = True
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    dropped_tokens: int = 0

    @property
    def example_id(self) -> str:
        """Digest of everything in the example: equal ids mean equal prompts and answers."""
        # What an example does not use is left out: a new field changes no id.
        used = {name: value for name, value in asdict(self).items() if value != _UNUSED.get(name, _ALWAYS)}
        payload = json.dumps(used, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(payload.encode()).hexdigest()[:16]

    @property
    def gold_text(self) -> str:
        """The answer whose likelihood is measured."""
        return self.answers[0] if self.gold is None else self.gold


def without_context(example: Example) -> Example:
    """The same question with nothing to read: what it scores, the model knew or guessed."""
    return replace(example, context="", joint="", earlier_turns=())


_ALWAYS = object()
_UNUSED = {f.name: f.default for f in fields(Example) if f.default is not MISSING}


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleRequest:
    """One point of a task's grid. `length_tokens` bounds the prompt plus the tokens to generate.

    A benchmark whose published form bounds the prompt alone (LongBench) says so.

    `depths` is empty for tasks that hide nothing at a depth.
    """

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
        if self.depths and self.num_examples % len(self.depths):
            raise ConfigError(
                f"{self.num_examples} examples on {len(self.depths)} depths give some depths more examples than "
                f"others, which favours some policies. Ask for a multiple of {len(self.depths)}."
            )


class Sizer(Protocol):
    """Counts tokens the way the model will see them; `prompting.PromptEncoder` is one."""

    def count(self, text: str) -> int:
        """Tokens of a piece of text, without special tokens."""
        ...

    def count_prompt(self, example: Example) -> int:
        """Tokens of the encoded prompt: what `encode` would give, without the work for segments and gold answer."""
        ...

    def cut_middle(self, text: str, max_tokens: int) -> tuple[str, int]:
        """The text with its middle cut out so that about `max_tokens` tokens stay, and how many went."""
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

    @property
    def metric(self) -> str:
        """Name of the measure of its answers in `metrics.registry`."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Tokens an answer may take unless a sweep says otherwise; 0 for a task that generates nothing."""
        ...

    @property
    def depths(self) -> tuple[float, ...]:
        """Depths that a sweep without depths asks for; empty for a task that hides nothing at a depth."""
        ...

    def examples(self, request: ExampleRequest, sizer: Sizer) -> list[Example]:
        """Build the examples of one request."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEntry:
    """How a task is made, and what is told of it without making it.

    Attributes:
        make: called with the task's name and its parameters by keyword; cheap, texts are read when examples are asked
            for. Raises ConfigError for data that is not where a parameter says.
        about: one line for `kvpolicy eval tasks`.
        params: names of the parameters that `make` takes.
    """

    make: Callable[..., Task]
    about: str
    params: tuple[str, ...] = ()


def to_dataset(examples: list[Example]) -> Any:
    """The examples as a `datasets.Dataset`: one column a field, one `coordinate_*` column a coordinate.

    Raises:
        ConfigError: the package `datasets` is missing.
    """
    from ..extras import require

    datasets = require("datasets", "A table of examples")
    names = dict.fromkeys(name for example in examples for name in example.coordinates)
    rows = []
    for example in examples:
        parts = {"example_id": example.example_id, "context": example.context, "question": example.question}
        answer = {"answer_prefix": example.answer_prefix, "answers": list(example.answers)}
        # The table has the columns of its first row.
        grid = {f"coordinate_{name}": example.coordinates.get(name) for name in names}
        rows.append({**parts, **answer, **grid})
    return datasets.Dataset.from_list(rows)
