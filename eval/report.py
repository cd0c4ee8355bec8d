"""A run as files: `report.md`, `report.html`, `report.csv` and `report.png`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .canary import canary_note
from .report_notes import reading_notes
from .report_overview import OVERVIEW_NOTE, overview_table
from .report_tables import (
    Table,
    cell_table,
    depth_table,
    outcome_counts,
    outcome_table,
    paired_table,
    tables,
)
from .results import Result, RunSource, results_of
from .summary import CellSummary

__all__ = ["FILES", "markdown_table", "report_markdown", "write_report"]

_AS_TEXT = str.maketrans({"&": "&amp;", "<": "&lt;", "|": "&#124;"})

FILES = ("report.md", "report.html", "report.csv", "report.png")


def write_report(source: RunSource, out: Path) -> list[CellSummary]:
    """Write `FILES` into the existing folder `out` and return the summaries.

    Raises:
        ConfigError: the source holds no run or no rows, or matplotlib or Jinja2 is missing.
    """
    from .csv_report import report_csv
    from .html_report import report_html
    from .plots import save_plots

    run, results = source.read_run(), results_of(source)
    summaries = [result.summary for result in results]
    # Everything is made before anything is written: a missing package leaves no half of a report.
    page = report_html(run, results)
    save_plots(summaries, out / "report.png")
    texts = {
        "report.md": report_markdown(run, results, image=Path("report.png")),
        "report.html": page,
        "report.csv": report_csv(results),
    }
    for name, text in texts.items():
        (out / name).write_text(text, encoding="utf-8", newline="")
    return summaries


def report_markdown(run: Mapping[str, Any], results: Sequence[Result], image: Path) -> str:
    """The whole report as Markdown."""
    lines = ["# Evaluation report", "", *_header(run), "", f"![score and NLL over measured bytes]({image})"]
    overview = overview_table(result.summary for result in results)
    if overview.rows:
        lines += ["", "## All task points", "", OVERVIEW_NOTE, "", *markdown_table(overview)]
    for title, group in tables(result.summary for result in results):
        lines += ["", f"## {_markdown_text(title)}", "", *markdown_table(cell_table(group))]
        for heading, table in (("Paired differences", paired_table(group)), ("By depth", depth_table(group))):
            lines += ["", f"### {heading}", "", *markdown_table(table)] if table.rows else []
    lines += ["", "## Outcomes", "", "Every cell; one without a result carries no score and enters no mean.", ""]
    lines += [*markdown_table(outcome_counts(results)), "", *markdown_table(outcome_table(results))]
    lines += ["", "## Reading this", "", *(f"- {note}" for note in reading_notes(run, results))]
    return "\n".join(lines) + "\n"


def markdown_table(table: Table) -> list[str]:
    """A table in lines of Markdown; none for a table without rows."""
    if not table.rows:
        return []
    return [_markdown_row(row) for row in (table.columns, ["---"] * len(table.columns), *table.rows)]


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_markdown_text(cell) for cell in cells) + " |"


def _markdown_text(text: str) -> str:
    """One line that is read as it stands: labels, reasons and answers hold whatever a sweep, error or model says."""
    # The pipe by its number: where a backslash stands before it, another one would end the cell.
    return " ".join(text.translate(_AS_TEXT).replace("](", "]&#40;").split())


def _header(run: Mapping[str, Any]) -> list[str]:
    identity = run["identity"]
    template = identity["template_sha256"][:12] if identity["uses_chat_template"] else "none"
    lines = [
        f"Model {identity['model']}, {identity['dtype']}, chat template {template}. Evidence: {run['evidence_class']}.",
        *(_place(environment) for environment in run["environments"].values()),
        *(canary_note(canary) for canary in run.get("canaries", {}).values()),
    ]
    for name, provenance in run["tasks"].items():
        lines.append(f"{name}: " + ", ".join(f"{key} {value}" for key, value in provenance.items()) + ".")
    return [line for text in lines for line in (_markdown_text(text), "")]


def _place(environment: Mapping[str, Any]) -> str:
    return "Ran with " + ", ".join(f"{name} {value}" for name, value in sorted(environment.items())) + "."
