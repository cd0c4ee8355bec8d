"""RULER's eight needle tasks (Hsieh et al. 2024, arXiv:2404.06654, table 4), generated without a network.

Parameters and tokens to generate are the published ones.
Deviations:
    the needle that is asked for alone lies at the depths of a fixed grid, which every policy sees in full; where
        several are asked for, they are spread over equal parts of RULER's 40 depths;
    an example begins anywhere in the prose, not always at its beginning;
    the wording is ours unless the parameter `templates` names a RULER checkout;
    prose other than RULER's essays is part of the name; the plain name needs the parameter `haystack`.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from .base import DEPTH_GRID, Example, ExampleRequest, Sizer, TaskEntry
from .haystack import noise
from .keys import key_words, random_value
from .prose import Prose, prose_entries, prose_provenance
from .ruler_text import TEMPLATE_PARAM, RulerWording, wording_of
from .sizing import SizedTask

__all__ = ["ENTRIES", "RULER_DEPTHS", "RulerNiahTask", "spread_depths"]

RULER_DEPTHS = tuple(round(100 * step / 39) / 100 for step in range(40))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Variant:
    about: str
    haystack: str = "prose"  # or "noise", "needle"
    key_type: str = "words"
    value_type: str = "numbers"
    num_keys: int = 1
    values_per_key: int = 1
    num_queries: int = 1

    @property
    def num_answers(self) -> int:
        return self.num_queries * self.values_per_key


_VARIANTS = {
    "niah_single_1": _Variant(about="one number in repeated noise", haystack="noise"),
    "niah_single_2": _Variant(about="one number in prose"),
    "niah_single_3": _Variant(about="one UUID in prose", value_type="uuids"),
    "niah_multikey_1": _Variant(about="one of four numbers with different keys in prose", num_keys=4),
    "niah_multikey_2": _Variant(about="one number in a text of other needles", haystack="needle"),
    "niah_multikey_3": _Variant(
        about="one UUID under a UUID in a text of other needles",
        haystack="needle",
        key_type="uuids",
        value_type="uuids",
    ),
    "niah_multivalue": _Variant(about="four numbers of one key in prose", values_per_key=4),
    "niah_multiquery": _Variant(about="the numbers of four keys in prose", num_keys=4, num_queries=4),
}


class _Distractors:
    """Needles with other keys, made as they are needed and then kept."""

    def __init__(self, rng: random.Random, make: Callable[[random.Random], str]) -> None:
        self._rng, self._make, self._made = rng, make, list[str]()

    def take(self, count: int) -> list[str]:
        self._made += [self._make(self._rng) for _ in range(count - len(self._made))]
        return self._made[:count]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    queries: tuple[str, ...]
    answers: tuple[str, ...]
    placed: tuple[tuple[float, str], ...]  # depth and needle; the first belongs to the first answer
    take: Callable[[int], list[str]]
    depth: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RulerNiahTask(SizedTask):
    """Needles of keys and values in prose, in noise or among other needles."""

    variant: _Variant
    wording: RulerWording
    prose: Prose
    metric: str = "string_match_all"
    max_new_tokens: int = 128

    @property
    def provenance(self) -> Mapping[str, str]:
        """Text around the needles, whose wording it is, and where keys come from."""
        found = {"haystack": self.variant.haystack, "key_source": key_words().source, **self.wording.provenance}
        if self.variant.haystack != "prose":
            return found
        return {**found, **prose_provenance(self.prose())}

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Draw:
        """Keys, values, where their needles lie, and what is asked for."""
        variant = self.variant
        keys = _keys(rng, variant.key_type, variant.num_keys)
        queries = rng.sample(keys, variant.num_queries)
        asked = [(key, _value(rng, variant.value_type)) for key in queries for _ in range(variant.values_per_key)]
        others = [(key, _value(rng, variant.value_type)) for key in keys if key not in queries]
        depth = request.depths[index % len(request.depths)] if request.depths else None
        depths = [depth] if depth is not None else spread_depths(rng, len(asked))
        if variant.num_queries > 1:
            rng.shuffle(depths)  # asked for in another order than they are told
        depths += rng.sample(RULER_DEPTHS, len(others))
        needles = [self._needle(key, value) for key, value in asked + others]
        return _Draw(
            queries=tuple(queries),
            answers=tuple(value for _, value in asked),
            placed=tuple(zip(depths, needles, strict=True)),
            take=self._filler(rng, queries[0]),
            depth=depth,
        )

    def compose(self, draw: _Draw, units: int, request: ExampleRequest) -> Example:
        """Sentences of prose joined by spaces, or lines of noise or needles."""
        filler = draw.take(units)
        # From the deepest to the shallowest, so that earlier insertions do not move later ones.
        for depth, needle in sorted(draw.placed, reverse=True):
            filler.insert(round(depth * units), needle)
        template, kind = self.wording.templates["niah"], self.variant.value_type
        if self.variant.num_answers == 1:
            template, kind = template.singular(), kind.removesuffix("s")
        joint = " " if self.variant.haystack == "prose" else "\n"
        return Example(
            **template.parts(joint.join(filler), type_needle_v=kind, query=_listed(draw.queries)),
            answers=draw.answers,
            gold=", ".join(draw.answers),
            coordinates={
                "length_tokens": request.length_tokens,
                **({} if draw.depth is None else {"depth_ratio": draw.depth}),
            },
        )

    def evidence(self, draw: _Draw) -> str | None:
        """The needle, where one is asked for."""
        return draw.placed[0][1] if len(draw.answers) == 1 else None

    def _needle(self, key: str, value: str) -> str:
        return self.wording.needle.format(type_needle_v=self.variant.value_type, key=key, value=value)

    def _filler(self, rng: random.Random, key: str) -> Callable[[int], list[str]]:
        if self.variant.haystack == "noise":
            return lambda count: [self.wording.noise_line] * count
        if self.variant.haystack == "needle":
            return _Distractors(random.Random(rng.random()), partial(self._other_needle, key)).take
        prose = self.prose()
        return partial(prose.take, rng.randrange(len(prose.sentences)))

    def _other_needle(self, key: str, rng: random.Random) -> str:
        """A needle whose key is not the one that is asked for."""
        first, second = _keys(rng, self.variant.key_type, 2)
        return self._needle(second if first == key else first, _value(rng, self.variant.value_type))


def spread_depths(rng: random.Random, count: int) -> list[float]:
    """Ascending depths, one from each of `count` equal parts of RULER's 40."""
    size = len(RULER_DEPTHS) // count
    return [rng.choice(RULER_DEPTHS[size * part : size * (part + 1)]) for part in range(count)]


def _keys(rng: random.Random, kind: str, count: int) -> list[str]:
    return key_words().draw(rng, count) if kind == "words" else [_uuid(rng) for _ in range(count)]


def _value(rng: random.Random, kind: str) -> str:
    return random_value(rng) if kind == "numbers" else _uuid(rng)


def _uuid(rng: random.Random) -> str:
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def _listed(queries: tuple[str, ...]) -> str:
    return queries[0] if len(queries) == 1 else f"{', '.join(queries[:-1])}, and {queries[-1]}"


def _make(name: str, *, variant: _Variant, prose: Prose, templates: str | None = None) -> RulerNiahTask:
    depths = DEPTH_GRID if variant.num_answers == 1 else ()
    return RulerNiahTask(name=name, variant=variant, wording=wording_of(templates), prose=prose, depths=depths)


def _entries() -> dict[str, TaskEntry]:
    found: dict[str, TaskEntry] = {}
    for short, variant in _VARIANTS.items():
        name, make = f"ruler_{short}", partial(_make, variant=variant)
        if variant.haystack == "prose":
            found |= prose_entries(name, make, variant.about, text_param="haystack", params=(TEMPLATE_PARAM,))
        else:
            # The prose is not used.
            found[name] = TaskEntry(make=partial(make, prose=noise), about=variant.about, params=(TEMPLATE_PARAM,))
    return found


ENTRIES: Mapping[str, TaskEntry] = _entries()
