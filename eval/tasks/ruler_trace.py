"""RULER's variable tracking (Hsieh et al. 2024, arXiv:2404.06654): one chain of four hops in noise.

A worked example of the same kind precedes the question, as published.
Deviations: the worked example always has five lines of noise; lengths that leave no room for the chain are refused
    instead of shortening it; the wording is ours unless `templates` names a RULER checkout.
"""

from __future__ import annotations

import random
import string
from collections.abc import Mapping
from dataclasses import dataclass

from .base import Example, ExampleRequest, Sizer, TaskEntry
from .ruler_text import TEMPLATE_PARAM, PromptParts, RulerWording, wording_of
from .sizing import SizedTask

__all__ = ["ENTRIES", "VariableTrackingTask"]

_HOPS = 4
_LINES_OF_EXAMPLE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Chain:
    value: str
    variables: tuple[str, ...]
    places: tuple[float, ...]

    @classmethod
    def drawn(cls, rng: random.Random, letters: int) -> _Chain:
        names: dict[str, None] = {}
        while len(names) < _HOPS + 1:  # 26 ** letters names: a second draw of the same one is rare
            names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
        places = tuple(sorted(rng.random() for _ in names))
        return cls(value=str(rng.randrange(10_000, 100_000)), variables=tuple(names), places=places)

    def among(self, noise_line: str, count: int) -> str:
        sources = (self.value, *(f"VAR {name}" for name in self.variables))
        steps = [f"VAR {name} = {source}" for name, source in zip(self.variables, sources, strict=False)]
        lines = [noise_line] * count
        for place, step in reversed(list(zip(self.places, steps, strict=True))):
            lines.insert(int(place * count), step)
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class VariableTrackingTask(SizedTask):
    """Find every variable that got a value, handed on from variable to variable."""

    wording: RulerWording
    metric: str = "string_match_all"
    max_new_tokens: int = 30

    @property
    def provenance(self) -> Mapping[str, str]:
        """Whose wording it is."""
        return {"haystack": "noise", **self.wording.provenance}

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> tuple[_Chain, _Chain]:
        """The worked example's chain, with shorter names, and the chain that is asked for."""
        return _Chain.drawn(rng, 3), _Chain.drawn(rng, 5)

    def unit_bounds(self, draw: tuple[_Chain, _Chain]) -> tuple[int, int | None]:
        """As many lines of noise as the chain has steps, or more."""
        return _HOPS + 1, None

    def compose(self, draw: tuple[_Chain, _Chain], units: int, request: ExampleRequest) -> Example:
        """The worked example with its answer, then lines of noise with the chain between them."""
        example, chain = draw
        shown, asked = self._parts(example, _LINES_OF_EXAMPLE), self._parts(chain, units)
        solved = f"{shown['context']}{shown['joint']}{shown['question']} {shown['answer_prefix'].rstrip()}"
        asked["context"] = f"{solved} {' '.join(example.variables)}\n\n{asked['context']}"
        return Example(
            **asked,
            answers=chain.variables,
            gold=" ".join(chain.variables),
            coordinates={"length_tokens": request.length_tokens},
        )

    def _parts(self, chain: _Chain, count: int) -> PromptParts:
        template, text = self.wording.templates["variable_tracking"], chain.among(self.wording.noise_line, count)
        return template.parts(text, query=chain.value, num_v=len(chain.variables))


ENTRIES: Mapping[str, TaskEntry] = {
    "ruler_vt": TaskEntry(
        make=lambda name, templates=None: VariableTrackingTask(name=name, wording=wording_of(templates)),
        about="all variables that a value was handed on to",
        params=(TEMPLATE_PARAM,),
    ),
}
