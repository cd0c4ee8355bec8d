"""A run as `report.html`: one page that needs nothing beside it, neither files, scripts nor a network."""

from __future__ import annotations

import importlib.resources
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

from ..contract.canonical import sha256_of
from .canary import canary_note
from .cells import settings_of
from .extras import require
from .figures import (
    MAP_COLOURS,
    PANELS,
    draw_curves,
    draw_front,
    draw_heat_map,
    legend_of,
    page_panel,
    styles_of,
    svg_of,
)
from .pareto import on_front
from .report_notes import reading_notes
from .report_overview import OVERVIEW_NOTE, overview_table
from .report_tables import (
    Table,
    cell_table,
    depth_table,
    outcome_counts,
    outcome_table,
    paired_table,
    refusal_of,
    table_cells,
    tables,
)
from .results import Result, delta_of
from .summary import CellSummary

if TYPE_CHECKING:
    from markupsafe import Markup

    from .figures import Style

__all__ = ["heat_maps", "report_html"]

_TEMPLATE = "templates/report.html.j2"
_FIGURE_INCHES = (4.7, 3.3)
# A folder name of one machine, which packed runs do not carry either.
_LEFT_OUT = ("model_source",)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Mean scores of one policy and budget by (depth, length)."""

    label: str
    cells: Mapping[tuple[float, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMaps:
    """The maps of a task: all have the same lines and columns."""

    title: str
    depths: Sequence[float]
    lengths: Sequence[int]
    maps: Sequence[HeatMap]


def report_html(run: Mapping[str, Any], results: Sequence[Result]) -> str:
    """The text of the page.

    Raises:
        ConfigError: Jinja2 or matplotlib is missing.
    """
    jinja2 = require("jinja2", "The page of a report")
    require("matplotlib", "The figures of a report")
    summaries = [result.summary for result in results]
    drawing = _Drawing(styles=styles_of(summaries))
    source = importlib.resources.files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8")
    # Labels and reasons hold whatever a sweep or an error says: everything is escaped but our own figures.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    text: str = environment.from_string(source).render(
        run=run,
        canaries=[(canary_note(found), not found["answered"]) for found in run.get("canaries", {}).values()],
        counts=outcome_counts(results),
        overview=overview_table(summaries),
        overview_note=OVERVIEW_NOTE,
        points=[_point(title, group, drawing) for title, group in tables(summaries)],
        heat_maps=[_heat_section(found, drawing) for found in heat_maps(summaries)],
        scale=drawing.scale(),
        outcomes=outcome_table(results),
        coordinates=_coordinates(run),
        sweep=json.dumps(run["sweep"], indent=2, ensure_ascii=False) if "sweep" in run else None,
        notes=reading_notes(run, results),
    )
    return text


def heat_maps(summaries: Iterable[CellSummary]) -> list[HeatMaps]:
    """By task and how it was asked; only where needles lie at two depths or more."""
    every = list(summaries)
    setting = settings_of(summary.cell for summary in every)
    groups: dict[str, dict[str, list[CellSummary]]] = {}
    for summary in every:
        cell = summary.cell
        if summary.measured is not None and summary.measured.depths:
            groups.setdefault(f"{cell.task}{setting(cell)}", {}).setdefault(cell.label, []).append(summary)
    found = []
    for title, by_label in groups.items():
        maps = [HeatMap(label=label, cells=_mean_scores(members)) for label, members in by_label.items()]
        depths = sorted({depth for entry in maps for depth, _ in entry.cells})
        lengths = sorted({length for entry in maps for _, length in entry.cells})
        if len(depths) > 1:
            found.append(HeatMaps(title=title, depths=depths, lengths=lengths, maps=maps))
    return found


def _mean_scores(members: Iterable[CellSummary]) -> dict[tuple[float, int], float]:
    scores: dict[tuple[float, int], list[float]] = {}
    for summary in members:
        if summary.measured is None:
            continue
        for key, depth in summary.measured.depths.items():
            scores.setdefault((depth, summary.cell.length_tokens), []).append(summary.measured.scores[key])
    return {place: sum(values) / len(values) for place, values in scores.items()}


@dataclass(slots=True, kw_only=True)
class _Drawing:
    """Figures as SVG, each with ids of its own."""

    styles: Mapping[str, Style]
    numbers: Iterable[int] = field(default_factory=count)

    def curves(self, group: Sequence[CellSummary]) -> list[Markup]:
        """Score and NLL over bytes."""
        found = []
        for name, read in PANELS:
            figure, panel = page_panel(_FIGURE_INCHES)
            draw_curves(panel, group, read, self.styles)
            panel.set_ylabel(name)
            if name == "score":
                panel.set_ylim(-0.05, 1.05)
            found.append(self._svg(figure, f"{name} over {panel.get_xlabel()}"))
        return found

    def front(self, group: Sequence[CellSummary]) -> list[Markup]:
        """Score over bytes and over decode time."""
        found = []
        for over_time in (False, True):
            figure, panel = page_panel(_FIGURE_INCHES)
            draw_front(panel, group, self.styles, over_time=over_time)
            found.append(self._svg(figure, f"Pareto front: score over {panel.get_xlabel()}"))
        return found

    def heat_map(self, entry: HeatMap, of: HeatMaps) -> Markup:
        """One policy and budget."""
        width, height = 0.75 + 0.5 * len(of.lengths), 0.65 + 0.27 * len(of.depths)
        figure, panel = page_panel((max(width, 1.6), height))
        draw_heat_map(panel, entry.cells, of.depths, of.lengths)
        panel.set(xlabel="tokens", ylabel="depth")
        return self._svg(figure, f"scores of {entry.label} by depth and length")

    def scale(self) -> Markup:
        """The colours of every heat map."""
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize

        figure, panel = page_panel((3.2, 0.55))
        bar = figure.colorbar(ScalarMappable(Normalize(0, 1), MAP_COLOURS), cax=panel, orientation="horizontal")
        bar.outline.set_visible(False)
        return self._svg(figure, "colours from score 0 to score 1")

    def legend(self, group: Iterable[CellSummary]) -> list[tuple[Markup, str]]:
        """A drawn line and its name, for each curve."""
        found = []
        for name, label in legend_of(group).items():
            figure, panel = page_panel((0.5, 0.2))
            panel.plot([0, 1, 2], [0, 0, 0], markevery=[1], linewidth=1.6, markersize=7, **self.styles[name].keywords())
            panel.axis("off")
            found.append((self._svg(figure, None), label))
        return found

    def _svg(self, figure: Any, description: str | None) -> Markup:
        """What no text beside it says is described for those who do not see it; a swatch's name stands beside it."""
        from markupsafe import Markup, escape

        text = svg_of(figure, f"f{next(iter(self.numbers))}")
        role = 'aria-hidden="true"' if description is None else f'role="img" aria-label="{escape(description)}"'
        return Markup(text.replace("<svg ", f"<svg {role} ", 1))


def _point(title: str, group: Sequence[CellSummary], drawing: _Drawing) -> dict[str, Any]:
    refusal = refusal_of(group)
    is_drawn = refusal is None and any(summary.measured is not None for summary in group)
    return {
        "title": title,
        "refusal": refusal,
        "floor": group[0].floor_score,
        "curves": drawing.curves(group) if is_drawn else [],
        "legend": drawing.legend(group) if is_drawn else [],
        "front": drawing.front(group) if is_drawn else [],
        "front_table": _front_table(group),
        "cells": cell_table(group),
        "paired": paired_table(group),
        "depths": depth_table(group),
    }


def _front_table(group: Sequence[CellSummary]) -> Table:
    rows = []
    for number, summary in enumerate(on_front(group), start=1):
        texts = dict(zip(cell_table([summary]).columns, table_cells(summary), strict=True))
        rows.append([str(number), *(texts[name] for name in ("policy", "score [95%]", "MiB", "ms/token"))])
    return Table(columns=["no.", "policy", "score [95%]", "MiB", "ms/token"], rows=rows)


def _heat_section(found: HeatMaps, drawing: _Drawing) -> dict[str, Any]:
    maps = [(entry.label, drawing.heat_map(entry, found)) for entry in found.maps]
    return {"title": found.title, "maps": maps}


def _coordinates(run: Mapping[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """What all cells share, in groups: the model, the run itself, where it ran, where its texts come from."""
    nested = ("identity", "environments", "canaries", "tasks", "sweep")
    own = {key: value for key, value in run.items() if key not in (*nested, *_LEFT_OUT)}
    kept = {key: value for key, value in run.items() if key not in _LEFT_OUT}
    own |= {"delta": delta_of(run), "run_sha256": sha256_of(kept)}
    groups: list[tuple[str, Mapping[str, Any]]] = [("Model and prompt format", run["identity"]), ("Run", own)]
    groups += [(f"Where it ran: {key}", place) for key, place in run["environments"].items()]
    groups += [(f"Canary: {key}", found) for key, found in run.get("canaries", {}).items()]
    groups += [(f"Task: {name}", provenance) for name, provenance in run["tasks"].items()]
    return [(title, [(key, _plain(value)) for key, value in sorted(values.items())]) for title, values in groups]


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True, default=str)
