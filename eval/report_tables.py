"""What a report's tables say, before anything is said about Markdown, HTML or terminals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from .cells import settings_of
from .outcomes import Outcome
from .pairing import BASELINES, pairs
from .results import Result
from .retention import MINIMUM_RANGE
from .statistics import Interval
from .summary import CellSummary, Measured
from .sweep import NO_CONTEXT

__all__ = [
    "BYTES_NOTE",
    "COLUMNS",
    "COST_COLUMNS",
    "Table",
    "cell_table",
    "depth_table",
    "full_of",
    "outcome_counts",
    "outcome_table",
    "paired_table",
    "quality_table",
    "refusal_of",
    "table_cells",
    "tables",
]

COLUMNS = (
    "policy",
    "n",
    "score [95%]",
    "answer NLL [95%]",
    "KL to full",
    "top-1",
    "rows (min-max)",
    "rows over time",
    "kept",
    "MiB",
    "of full K/V",
    "prefill s",
    "ms/token",
    "outcome",
)
# What a run costs, for terminals too narrow for one table of everything.
COST_COLUMNS = ("rows (min-max)", "rows over time", "kept", "MiB", "of full K/V", "prefill s", "ms/token")
_PAGE_COLUMNS = ("policy", "n", "score [95%]", "answer NLL [95%]", "rows (min-max)", "outcome")
BYTES_NOTE = (
    "MiB and the share of the full K/V are measured from tensor storages: slack (slots without a row), maps and "
    "scores are included, so the share of bytes lies above the share of rows kept."
)
_BYTES_PER_MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Texts under column names; no rows where there is nothing to show."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


def tables(summaries: Iterable[CellSummary]) -> list[tuple[str, list[CellSummary]]]:
    """Summaries by what all policies were asked alike, each group with a title that carries its warnings.

    That is task, length, whether the question was seen and how long an answer may be.
    """

    def point(summary: CellSummary) -> tuple[str, int, bool, int]:
        cell = summary.cell
        return cell.task, cell.length_tokens, not cell.query_aware, cell.max_new_tokens

    every, found = list(summaries), []
    setting = settings_of(summary.cell for summary in every)
    for (task, length, _, _), members in groupby(sorted(every, key=point), key=point):
        group = list(members)
        title = f"{task}, {length} tokens{setting(group[0].cell)}"
        if not any(summary.interpretable for summary in group):
            title += f" (not interpretable: {_why_not_interpretable(group)})"
        found.append((title, group))
    return found


def _why_not_interpretable(group: Sequence[CellSummary]) -> str:
    if any(summary.cell.is_full and summary.outcome is Outcome.CHECKPOINT_INCOMPATIBLE for summary in group):
        return "the checkpoint takes no full cache"
    is_floor_known = group[0].floor_score is not None
    return f"the full cache {'is hardly better than no context' if is_floor_known else 'does not solve this task'}"


def full_of(group: Iterable[CellSummary]) -> Measured | None:
    """What the full cache measured at one task point, if it ran there."""
    return next((summary.measured for summary in group if summary.cell.is_full), None)


def refusal_of(group: Sequence[CellSummary]) -> str | None:
    """Why a task point may have no curve: it was asked without its text too, and the text is worth too little."""
    full, floor = full_of(group), group[0].floor_score
    if full is None or floor is None or any(summary.interpretable for summary in group):
        return None
    return (
        f"The full cache scores {full.score.mean:.2f} and no context {floor:.2f}; with less than {MINIMUM_RANGE} "
        "between them, noise in either moves a curve more than any policy does."
    )


def cell_table(group: Iterable[CellSummary]) -> Table:
    """All of `COLUMNS`."""
    return Table(columns=COLUMNS, rows=[table_cells(summary) for summary in group])


def table_cells(summary: CellSummary) -> list[str]:
    """One table row as text; a cell without a result has its status and no numbers."""
    measured = summary.measured
    if measured is None:
        blank = [""] * (len(COLUMNS) - 4)
        return [summary.cell.label, "", summary.status, *blank, str(summary.outcome)]
    rows = f"{measured.prompt_rows:.1f} ({measured.prompt_rows_min}-{measured.prompt_rows_max})"
    return [
        summary.cell.label,
        f"{measured.n}{' smoke' if summary.is_smoke else ''}",
        _interval(measured.score),
        _interval(measured.answer_nll),
        _optional(measured.kl_to_full_nats, ".3f"),
        _optional(measured.top1_agreement_ratio, ".3f"),
        rows,
        _optional(measured.rows_over_time, ".1f"),
        f"{measured.kept_ratio:.3f}",
        f"{measured.measured_bytes / _BYTES_PER_MIB:.3f}",
        # Without the text, the full cache of the prompt is another one.
        "" if summary.cell.policy == NO_CONTEXT else f"{measured.measured_bytes / measured.full_kv_bytes:.1%}",
        f"{measured.prefill_s:.2f}",
        f"{measured.decode_ms_per_token:.1f}",
        _outcome(summary),
    ]


def quality_table(group: Iterable[CellSummary]) -> Table:
    """Score, NLL and rows of each cell: what a page of results shows of `COLUMNS`."""
    chosen = [COLUMNS.index(name) for name in _PAGE_COLUMNS]
    return Table(columns=_PAGE_COLUMNS, rows=[[table_cells(summary)[i] for i in chosen] for summary in group])


def paired_table(group: Iterable[CellSummary]) -> Table:
    """Differences to the baselines of the same budget; no rows where there is no baseline."""
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
    return Table(columns=["policy", *columns], rows=rows)


def depth_table(group: Iterable[CellSummary]) -> Table:
    """Mean score and NLL at every depth; no rows for tasks without depths."""
    measured = [(summary.cell.label, summary.measured) for summary in group if summary.measured is not None]
    depths = sorted({depth for _, found in measured for depth in found.depths.values()})
    rows = []
    for label, found in measured if depths else []:
        at = [[key for key, depth in found.depths.items() if depth == wanted] for wanted in depths]
        rows.append([label, *(f"{_mean(found.scores, ids)} / {_mean(found.nlls, ids)}" for ids in at)])
    return Table(columns=["policy", *(f"depth {depth:g}" for depth in depths)], rows=rows)


def outcome_table(results: Iterable[Result]) -> Table:
    """Every cell that was asked for, with what became of it and why."""
    rows = []
    for result in results:
        summary, cell = result.summary, result.summary.cell
        question = "seen" if cell.query_aware else "unseen"
        place = [cell.task, str(cell.length_tokens), question, str(len(result.rows))]
        rows.append([cell.label, str(summary.outcome), summary.status, summary.reason or "", *place])
    return Table(columns=["policy", "outcome", "status", "reason", "task", "tokens", "question", "n"], rows=rows)


def outcome_counts(results: Iterable[Result]) -> Table:
    """How many cells came to each outcome, those that none came to included."""
    counts = Counter(result.summary.outcome for result in results)
    return Table(columns=["outcome", "cells"], rows=[[str(outcome), str(counts[outcome])] for outcome in Outcome])


def _mean(values: Mapping[str, float], ids: list[str]) -> str:
    return f"{sum(values[key] for key in ids) / len(ids):.2f}" if ids else "-"


def _optional(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


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
