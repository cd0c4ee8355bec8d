"""Examples that fill a length: how many units of text fit, found in a bounded number of steps."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ...errors import ConfigError
from .base import Example, ExampleRequest, Sizer

__all__ = ["SizedTask", "largest_fitting", "with_distance"]

# Draws before there are held to be no other examples.
_MOST_DRAWS = 32


def largest_fitting(tokens_of: Callable[[int], int], limit_tokens: int, low: int, high: int | None = None) -> int:
    """A number of units that fits while one more does not; `high` units if all fit.

    Grows by doubling, then closes in on the end by interpolating and halving in turn: a few measurements for text
    whose units are alike, and never more than the logarithm of the limit.

    Args:
        tokens_of: tokens of a text with so many units; every unit has at least one token.
        limit_tokens: tokens that must not be passed.
        low: units that are known to fit.
        high: units that there are; None for no end.
    """
    most = limit_tokens + 1 if high is None else high
    fits, passes = (low, tokens_of(low)), (most + 1, 0)
    step = 1
    while fits[0] < most:
        probe = min(low + step, most)
        tokens = tokens_of(probe)
        if tokens > limit_tokens:
            passes = (probe, tokens)
            break
        fits, step = (probe, tokens), 2 * step
    halve = False
    while fits[0] + 1 < passes[0]:
        width = passes[0] - fits[0]
        share = width // 2 if halve else (limit_tokens - fits[1]) * width // (passes[1] - fits[1])
        probe = fits[0] + min(max(share, 1), width - 1)
        tokens, halve = tokens_of(probe), not halve
        fits, passes = (fits, (probe, tokens)) if tokens > limit_tokens else ((probe, tokens), passes)
    return fits[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class SizedTask(ABC):
    """A task whose examples grow by units (sentences, lines, documents) until the length is reached.

    A family says what is drawn by chance, once an example and before its size is known, and how an example with a
    number of units looks.
    """

    name: str
    metric: str
    max_new_tokens: int
    depths: tuple[float, ...] = ()

    @property
    @abstractmethod
    def provenance(self) -> Mapping[str, str]:
        """Where its texts come from."""

    @abstractmethod
    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> Any:
        """Every choice by chance of the example `index`."""

    @abstractmethod
    def compose(self, draw: Any, units: int, request: ExampleRequest) -> Example:
        """The example with so many units."""

    def unit_bounds(self, draw: Any) -> tuple[int, int | None]:
        """The fewest units that make an example, and the most that there are (None: no end)."""
        return 0, None

    def evidence(self, draw: Any) -> str | None:
        """The piece of text that answers; its distance to the question becomes a coordinate."""
        return None

    def check(self, request: ExampleRequest) -> None:  # noqa: B027  # most families accept every request
        """Refuse a request that the family cannot serve evenly."""

    def examples(self, request: ExampleRequest, sizer: Sizer) -> list[Example]:
        """Build `num_examples` examples, no two of them alike.

        Raises:
            ConfigError: the length is too small, or there are not so many.
        """
        self.check(request)
        found: dict[str, Example] = {}
        for index in range(request.num_examples):
            example = self._other_example(found, request, sizer, index)
            found[example.example_id] = example
        return list(found.values())

    def minimum_length_tokens(self, request: ExampleRequest, sizer: Sizer) -> int:
        """Tokens of this request's longest prompt with the fewest units, plus the tokens to generate."""
        draws = [self._draw(request, sizer, index) for index in range(request.num_examples)]
        return max(self.tokens(draw, self.unit_bounds(draw)[0], request, sizer) for draw in draws)

    def tokens(self, draw: Any, units: int, request: ExampleRequest, sizer: Sizer) -> int:
        """Tokens that an example takes: prompt and tokens to generate."""
        return sizer.count_prompt(self.compose(draw, units, request)) + request.max_new_tokens

    def _other_example(self, others: Container[str], request: ExampleRequest, sizer: Sizer, index: int) -> Example:
        """Build an example that is none of the others: by chance some are drawn twice."""
        for again in range(_MOST_DRAWS):
            example = self._example(request, sizer, index, again)
            if example.example_id not in others:
                return example
        raise ConfigError(
            f"Task {self.name!r} was asked for {request.num_examples} examples of {request.length_tokens} tokens, and "
            f"{_MOST_DRAWS} draws brought none that differs from the first {index}. Ask for fewer, or give more data."
        )

    def _draw(self, request: ExampleRequest, sizer: Sizer, index: int, again: int = 0) -> Any:
        # Seeding with a string is stable across processes and Python versions, unlike hash().
        parts = [request.seed, self.name, request.length_tokens, index, *([again] if again else [])]
        return self.draw(random.Random("/".join(map(str, parts))), request, index, sizer)

    def _example(self, request: ExampleRequest, sizer: Sizer, index: int, again: int) -> Example:
        draw = self._draw(request, sizer, index, again)
        fewest, most = self.unit_bounds(draw)
        if self.tokens(draw, fewest, request, sizer) > request.length_tokens:
            raise ConfigError(
                f"Task {self.name!r} cannot be built with {request.length_tokens} tokens: what it asks for needs at "
                f"least {self.minimum_length_tokens(request, sizer)}, the {request.max_new_tokens} tokens to generate "
                "included. Ask for a larger length."
            )
        units = largest_fitting(
            lambda count: self.tokens(draw, count, request, sizer), request.length_tokens, fewest, most
        )
        return self.finish(self.compose(draw, units, request), draw, sizer)

    def finish(self, example: Example, draw: Any, sizer: Sizer) -> Example:
        """The example with the coordinates that are known only now."""
        evidence = self.evidence(draw)
        if evidence is None:
            return example
        # How far back the answer lies decides what a recency policy can see, so it is a coordinate of its own.
        return with_distance(example, evidence, sizer)


def with_distance(example: Example, evidence: str, sizer: Sizer) -> Example:
    """The example with `distance_tokens`: tokens of the text between the evidence and the question."""
    after = example.context.rpartition(evidence)[2]
    return replace(example, coordinates={**example.coordinates, "distance_tokens": sizer.count(after)})
