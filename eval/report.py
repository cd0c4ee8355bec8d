"""A run as tables: `report.md`, and the same rows for the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from .outcomes import DEFAULT_DELTA, Outcome
from .pairing import BASELINES, pairs
from .records import Row
from .statistics import SMOKE_BELOW, Interval
from .summary import CellSummary, summarise

__all__ = [
    "BYTES_NOTE",
    "COLUMNS",
    "COST_COLUMNS",
    "RunSource",
    "delta_of",
    "depth_table",
    "paired_table",
    "quality_table",
    "report_markdown",
    "summaries_of",
    "table_cells",
    "tables",
    "write_report",
]

COLUMNS = (
    "policy",
    "n",
    "score [95%]",
    "answer NLL [95%]",
    "rows (min-max)",
    "kept",
    "MiB",
    "of full K/V",
    "prefill s",
    "ms/token",
    "outcome",
)
# What a run costs, for terminals too narrow for one table of everything.
COST_COLUMNS = ("rows (min-max)", "kept", "MiB", "of full K/V", "prefill s", "ms/token")
BYTES_NOTE = (
    "MiB and the share of the full K/V are measured from tensor storages: slack (slots without a row), maps and "
    "scores are included, so the share of bytes lies above the share of rows kept."
)
_BYTES_PER_MIB = 2**20


class RunSource(Protocol):
    """Where a run is read from: its folder (`RunDirectory`), or one file (`PackedRun`)."""

    @property
    def path(self) -> Path:
        """The folder or file."""
        ...

    def read_run(self) -> dict[str, Any]:
        """Configuration, digests and versions."""
        ...

    def rows(self) -> list[Row]:
        """One row an example."""
        ...


def summaries_of(source: RunSource) -> list[CellSummary]:
    """One summary a cell.

    Raises:
        ConfigError: there are no rows.
    """
    rows = source.rows()
    if not rows:
        raise ConfigError(f"{source.path} holds no rows yet. Run `kvpolicy eval run` with --out there first.")
    return summarise(rows, delta=delta_of(source.read_run()))


def delta_of(run: Mapping[str, Any]) -> float:
    """The loss of score that this run holds to be none."""
    return float(run.get("delta", DEFAULT_DELTA))


def write_report(source: RunSource, out: Path) -> list[CellSummary]:
    """Write `report.md` and `report.png` into the folder `out` and return the summaries.

    Raises:
        ConfigError: the source holds no run or no rows, or matplotlib is missing.
    """
    from .plots import save_plots

    run, summaries = source.read_run(), summaries_of(source)
    save_plots(summaries, out / "report.png")
    text = report_markdown(run, summaries, image=Path("report.png"))
    (out / "report.md").write_text(text, encoding="utf-8")
    return summaries


def tables(summaries: Iterable[CellSummary]) -> list[tuple[str, list[CellSummary]]]:
    """Summaries by task and length, each with a title that carries its warnings."""

    def point(summary: CellSummary) -> tuple[str, int]:
        return summary.cell.task, summary.cell.length_tokens

    found = []
    for (task, length), members in groupby(sorted(summaries, key=point), key=point):
        group = list(members)
        title = f"{task}, {length} tokens"
        if not any(summary.interpretable for summary in group):
            title += " (not interpretable: the full cache does not solve this task)"
        found.append((title, group))
    return found


def table_cells(summary: CellSummary) -> list[str]:
    """One table row as text; a cell without a result has its status and no numbers."""
    measured = summary.measured
    if measured is None:
        return [summary.cell.label, "", summary.status, "", "", "", "", "", "", "", str(summary.outcome)]
    rows = f"{measured.prompt_rows:.1f} ({measured.prompt_rows_min}-{measured.prompt_rows_max})"
    return [
        summary.cell.label,
        f"{measured.n}{' smoke' if summary.is_smoke else ''}",
        _interval(measured.score),
        _interval(measured.answer_nll),
        rows,
        f"{measured.kept_ratio:.3f}",
        f"{measured.measured_bytes / _BYTES_PER_MIB:.3f}",
        f"{measured.measured_bytes / measured.full_kv_bytes:.1%}",
        f"{measured.prefill_s:.2f}",
        f"{measured.decode_ms_per_token:.1f}",
        _outcome(summary),
    ]


def report_markdown(run: Mapping[str, Any], summaries: list[CellSummary], image: Path) -> str:
    """The whole report as Markdown."""
    lines = ["# Evaluation report", "", *_header(run), "", f"![score and NLL over measured bytes]({image})"]
    for title, group in tables(summaries):
        lines += ["", f"## {title}", "", *_markdown_table(COLUMNS, map(table_cells, group))]
        for heading, table in (("Paired differences", paired_table(group)), ("By depth", depth_table(group))):
            lines += ["", f"### {heading}", "", *table] if table else []
    failed = [summary for summary in summaries if summary.has_failed]
    if failed:
        lines += ["", "## Failed cells", "", "They carry no score and enter no mean.", ""]
        lines += [f"- {_where(summary)}: {summary.status}. {summary.reason}" for summary in failed]
    return "\n".join([*lines, "", *_notes(delta_of(run))]) + "\n"


def quality_table(group: Iterable[CellSummary]) -> list[str]:
    """Score, NLL and rows of each cell in lines of Markdown: what a page of results shows of `COLUMNS`."""
    chosen = [COLUMNS.index(name) for name in COLUMNS if name not in COST_COLUMNS[1:]]
    rows = (table_cells(summary) for summary in group)
    return _markdown_table([COLUMNS[i] for i in chosen], ([row[i] for i in chosen] for row in rows))


def paired_table(group: Iterable[CellSummary]) -> list[str]:
    """Differences to the baselines of the same budget in lines of Markdown; empty where there is no baseline."""
    cells = list(group)
    found = {(id(pair.summary), pair.baseline): pair for pair in pairs(cells)}
    present = [name for name in BASELINES if any(baseline == name for _, baseline in found)]
    rows = []
    for summary in cells:
        own = [found.get((id(summary), name)) for name in present]
        if any(own):
            texts = [[_interval(pair.score), _interval(pair.answer_nll)] if pair else ["", ""] for pair in own]
            rows.append([summary.cell.label, *(text for pair_texts in texts for text in pair_texts)])
    columns = [f"{measure} - {name}" for name in present for measure in ("score", "NLL")]
    return _markdown_table(["policy", *columns], rows) if rows else []


def depth_table(group: Iterable[CellSummary]) -> list[str]:
    """Mean score and NLL at every depth in lines of Markdown; empty for tasks without depths."""
    measured = [(summary.cell.label, summary.measured) for summary in group if summary.measured is not None]
    depths = sorted({depth for _, found in measured for depth in found.depths.values()})
    rows = []
    for label, found in measured:
        at = [[key for key, depth in found.depths.items() if depth == wanted] for wanted in depths]
        rows.append([label, *(f"{_mean(found.scores, ids)} / {_mean(found.nlls, ids)}" for ids in at)])
    return _markdown_table(["policy", *(f"depth {depth:g}" for depth in depths)], rows) if depths else []


def _mean(values: Mapping[str, float], ids: list[str]) -> str:
    return f"{sum(values[key] for key in ids) / len(ids):.2f}" if ids else "-"


def _header(run: Mapping[str, Any]) -> list[str]:
    identity = run["identity"]
    template = identity["template_sha256"][:12] if identity["uses_chat_template"] else "none"
    lines = [
        f"Model {identity['model']}, {identity['dtype']}, chat template {template}. Evidence: {run['evidence_class']}.",
        *(_place(environment) for environment in run["environments"].values()),
    ]
    for name, provenance in run["tasks"].items():
        lines.append(f"{name}: " + ", ".join(f"{key} {value}" for key, value in provenance.items()) + ".")
    return [line for text in lines for line in (text, "")]


def _place(environment: Mapping[str, Any]) -> str:
    return "Ran with " + ", ".join(f"{name} {value}" for name, value in sorted(environment.items())) + "."


def _notes(delta: float) -> list[str]:
    return [
        "## Reading this",
        "",
        "- Score: share of gold answers that occur in the greedy output. NLL: nats per token of the gold answer,",
        "  fed token by token.",
        "- Intervals, 95%, over examples: Wilson's for right-or-wrong scores and Tango's for their paired differences;",
        "  a BCa bootstrap for graded scores and for NLL.",
        "- Outcome: the score minus the full cache's, example by example. degraded: the whole interval",
        f"  lies below -{delta:g}; valid: above it, at {SMOKE_BELOW} examples or more; otherwise the examples are too",
        "  few to say. equals-full: the budget takes nothing from any prompt, so nothing was run.",
        "- Paired differences: this policy minus the other on the same examples at the same budget. By depth: score",
        "  / NLL of the examples whose needle lies there; 0 is the beginning of the text.",
        f"- smoke: fewer than {SMOKE_BELOW} examples; shows that things run, supports no claim.",
        "- Rows are per layer and head; rows and MiB are what the cache held right after the prompt. Every prompt",
        "  carries its question, so selection is question-aware. Prompts are sized, never truncated.",
        f"- {BYTES_NOTE}",
    ]


def _where(summary: CellSummary) -> str:
    return f"{summary.cell.task}, {summary.cell.length_tokens} tokens, {summary.cell.label}"


def _outcome(summary: CellSummary) -> str:
    """The outcome with its reservation: what the examples cannot show is said, not left out."""
    if not summary.interpretable:
        return "not interpretable"
    smoke = " (smoke)" if summary.is_smoke else ""
    if summary.outcome is Outcome.UNMEASURED:
        return f"{summary.outcome}: {summary.reason}{smoke}"
    return f"{summary.outcome}{smoke}"


def _interval(interval: Interval) -> str:
    return f"{interval.mean:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_markdown_row(columns), _markdown_row(["---"] * len(columns)), *map(_markdown_row, rows)]


def _markdown_row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
