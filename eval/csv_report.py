"""A run as `report.csv`: one line a cell, every number of the tables in full precision."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from typing import Any

from ..contract.canonical import canonical_json
from ..errors import NotComparableError
from .pairing import BASELINES, pairs
from .pareto import is_compared, on_front
from .report_notes import cut_prompts
from .report_tables import full_of, tables
from .results import Result
from .retention import normalised_retention
from .statistics import Interval
from .summary import CellSummary, Measured
from .sweep import NO_CONTEXT

__all__ = ["report_csv"]

_CELL = (
    *("task", "length_tokens", "query_aware", "max_new_tokens"),
    *("policy", "options", "budget", "matched_to", "label", "seeds"),
    *("n", "truncated_examples", "status", "outcome", "reason", "interpretable", "smoke"),
)
_MEANS = (
    "perplexity",
    "kl_to_full_nats",
    "top1_agreement_ratio",
    "empty_outputs",
    "prompt_rows",
    "prompt_rows_min",
    "prompt_rows_max",
    "rows_over_time",
    "kept_ratio",
    "measured_bytes",
    "resident_bytes",
    "full_kv_bytes",
    "prefill_s",
    "decode_ms_per_token",
)
_INTERVAL = ("", "_low", "_high")
# The same for every run; only the depths of its tasks come after them.
_COLUMNS = (
    *_CELL,
    *(f"{name}{end}" for name in ("score", "answer_nll") for end in _INTERVAL),
    *_MEANS,
    "bytes_of_full_kv_ratio",
    *("on_pareto_front", "floor_score", "retained_ratio"),
    *(f"{name}_minus_{other}{end}" for other in BASELINES for name in ("score", "answer_nll") for end in _INTERVAL),
    *(f"n_paired_with_{other}" for other in BASELINES),
)


def report_csv(results: Sequence[Result]) -> str:
    """The text of the file; what a cell does not have is empty."""
    summaries = [result.summary for result in results]
    groups = [group for _, group in tables(summaries)]
    front = {id(summary) for group in groups for summary in on_front(group)}
    full = {id(member): full_of(group) for group in groups for member in group}
    differences = _differences(summaries)
    lines = [
        {
            **_cell(result),
            **_measures(result.summary),
            "on_pareto_front": id(result.summary) in front if is_compared(result.summary) else None,
            **_retention(result.summary, full[id(result.summary)]),
            **differences.get(id(result.summary), {}),
            **_by_depth(result.summary.measured),
        }
        for result in results
    ]
    depths = sorted({depth for result in results for depth in _depths(result.summary.measured)})
    file = io.StringIO()
    writer = csv.DictWriter(file, [*_COLUMNS, *map(_depth_column, depths)], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return file.getvalue()


def _cell(result: Result) -> dict[str, Any]:
    cell, summary = result.summary.cell, result.summary
    count, known, cut = cut_prompts(result.rows)
    return {
        "task": cell.task,
        "length_tokens": cell.length_tokens,
        "query_aware": cell.query_aware,
        "max_new_tokens": cell.max_new_tokens,
        "policy": cell.policy,
        "options": canonical_json(dict(cell.options)),
        "budget": cell.budget,
        "matched_to": None if cell.matched_to is None else cell.source.label,
        "label": cell.label,
        "seeds": " ".join(map(str, result.coordinates["seeds"])),
        "n": len(result.rows),
        "truncated_examples": cut if known == count else None,
        "status": summary.status,
        "outcome": str(summary.outcome),
        "reason": summary.reason,
        "interpretable": summary.interpretable,
        "smoke": summary.is_smoke,
    }


def _measures(summary: CellSummary) -> dict[str, Any]:
    measured = summary.measured
    if measured is None:
        return {}
    return {
        **_interval("score", measured.score),
        **_interval("answer_nll", measured.answer_nll),
        **{name: getattr(measured, name) for name in _MEANS},
        "bytes_of_full_kv_ratio": (
            None if summary.cell.policy == NO_CONTEXT else measured.measured_bytes / measured.full_kv_bytes
        ),
    }


def _retention(summary: CellSummary, full: Measured | None) -> dict[str, Any]:
    """What of the context's worth is kept, where the score without it was measured and lies far enough below."""
    floor, found = summary.floor_score, {"floor_score": summary.floor_score}
    if floor is None or full is None or summary.measured is None:
        return found
    try:
        kept = normalised_retention(summary.measured.score.mean, full=full.score.mean, floor=floor)
    except NotComparableError:
        return found
    return {**found, "retained_ratio": kept}


def _differences(summaries: Sequence[CellSummary]) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = {}
    for pair in pairs(summaries):
        found.setdefault(id(pair.summary), {}).update(
            {
                **_interval(f"score_minus_{pair.baseline}", pair.score),
                **_interval(f"answer_nll_minus_{pair.baseline}", pair.answer_nll),
                f"n_paired_with_{pair.baseline}": pair.n,
            }
        )
    return found


def _depths(measured: Measured | None) -> dict[tuple[float, str], float]:
    """Means by depth and measure."""
    if measured is None:
        return {}
    found = {}
    for depth in set(measured.depths.values()):
        ids = [key for key, own in measured.depths.items() if own == depth]
        for name, values in (("score", measured.scores), ("answer_nll", measured.nlls)):
            found[depth, name] = sum(values[key] for key in ids) / len(ids)
    return found


def _depth_column(key: tuple[float, str]) -> str:
    depth, name = key
    return f"{name}_at_depth_{depth:g}"


def _by_depth(measured: Measured | None) -> dict[str, float]:
    return {_depth_column(key): mean for key, mean in _depths(measured).items()}


def _interval(name: str, interval: Interval) -> dict[str, float]:
    values = (interval.mean, interval.low, interval.high)
    return {f"{name}{end}": value for end, value in zip(_INTERVAL, values, strict=True)}
