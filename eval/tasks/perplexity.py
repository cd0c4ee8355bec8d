"""Perplexity of running text where eviction happens: a prompt, then its continuation one token at a time.

Feeding a text at once measures nothing about a policy, because every token would attend to all earlier ones. Here the
prompt is a prompt, and each token of the continuation is fed to the cache that the policy keeps. Nothing is generated.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError
from .base import LIKELIHOOD, Example, ExampleRequest, Sizer, TaskEntry
from .prose import Prose, prose_entries, prose_provenance
from .sizing import SizedTask, largest_fitting

__all__ = ["ENTRIES", "PerplexityTask"]

_CONTINUATION_TOKENS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    place: int
    sentences_after: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityTask(SizedTask):
    """Sentences of a text, and the sentences that follow them; the length bounds both together."""

    prose: Prose
    continuation_tokens: int
    metric: str = LIKELIHOOD
    max_new_tokens: int = 0

    @property
    def provenance(self) -> Mapping[str, str]:
        """The text, and how much of it is fed one token at a time."""
        return {**prose_provenance(self.prose()), "continuation_tokens": str(self.continuation_tokens)}

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Draw:
        """Where the continuation begins, and how many sentences it has: one at least."""
        prose = self.prose()
        place = rng.randrange(len(prose.sentences))

        def tokens(count: int) -> int:
            return sizer.count(f" {' '.join(prose.take(place, count))}")

        return _Draw(place=place, sentences_after=largest_fitting(tokens, self.continuation_tokens, 1))

    def unit_bounds(self, draw: _Draw) -> tuple[int, int | None]:
        """At least one sentence before the continuation, and no sentence of it."""
        return 1, max(len(self.prose().sentences) - draw.sentences_after, 1)

    def compose(self, draw: _Draw, units: int, request: ExampleRequest) -> Example:
        """Plain text without a chat template: a continuation is no answer."""
        prose = self.prose()
        continuation = " ".join(prose.take(draw.place, draw.sentences_after))
        return Example(
            context=" ".join(prose.take(draw.place - units, units)),
            joint="",
            question="",
            answer_prefix="",
            answers=(continuation,),
            gold=f" {continuation}",
            chat_template=False,
            coordinates={"length_tokens": request.length_tokens},
        )

    def tokens(self, draw: Any, units: int, request: ExampleRequest, sizer: Sizer) -> int:
        """Tokens of the prompt and of its continuation."""
        encoded = sizer.encode(self.compose(draw, units, request))
        return len(encoded.token_ids) + len(encoded.answer_ids)


def _make(name: str, *, prose: Prose, continuation_tokens: Any = _CONTINUATION_TOKENS) -> PerplexityTask:
    if isinstance(continuation_tokens, bool) or not isinstance(continuation_tokens, int) or continuation_tokens < 1:
        raise ConfigError(
            f"continuation_tokens of task {name!r} must be a whole number of at least 1; got {continuation_tokens!r}."
        )
    return PerplexityTask(name=name, prose=prose, continuation_tokens=continuation_tokens)


ENTRIES: Mapping[str, TaskEntry] = prose_entries(
    "perplexity",
    _make,
    "likelihood of a continuation, fed one token at a time; nothing is generated",
    text_param="text",
    params=("continuation_tokens",),
)
