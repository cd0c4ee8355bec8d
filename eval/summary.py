"""From rows to one summary a cell. Failed cells stay in the list, with a reason and without a score."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..contract.canonical import canonical_json
from .cells import Cell
from .metrics.answer_nll import AnswerNLL
from .outcomes import OK, Outcome
from .records import Row
from .statistics import SMOKE_BELOW, Interval, bootstrap_mean, paired_difference

__all__ = ["VERDICT_FROM", "CellSummary", "Measured", "summarise"]

# With fewer examples an interval that includes zero is no sign of quality, so "quality-valid" is not given.
VERDICT_FROM = 10

# Below this the full cache itself cannot do the task, and a policy's score says nothing about the policy.
_CANARY_SCORE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the examples of a cell that ran; rows are per layer and head after the prompt."""

    n: int
    score: Interval
    answer_nll: Interval
    perplexity: float
    empty_outputs: int
    prompt_rows: float
    prompt_rows_min: int
    prompt_rows_max: int
    kept_ratio: float
    measured_bytes: float
    full_kv_bytes: float
    prefill_s: float
    decode_ms_per_token: float
    scores: Mapping[str, float]
    nlls: Mapping[str, float]
    # By example as the two above; empty for tasks that hide nothing at a depth.
    depths: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One cell, seeds pooled. `measured` is None when any of its rows failed."""

    cell: Cell
    status: str
    reason: str | None
    outcome: Outcome
    interpretable: bool
    measured: Measured | None

    @property
    def is_smoke(self) -> bool:
        """Whether there are too few examples for a claim."""
        return self.measured is None or self.measured.n < SMOKE_BELOW

    @property
    def is_withheld(self) -> bool:
        """Whether it ran, no loss was seen, and the examples are too few to say that there is none."""
        return self.interpretable and self.outcome is Outcome.UNMEASURED and self.measured is not None


def summarise(rows: Iterable[Row]) -> list[CellSummary]:
    """Group rows by cell (seeds pooled) and summarise each, in the order in which cells first appear."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[_group_key(row.cell)].append(row)
    measured = {key: _measure(group) for key, group in groups.items() if _failure(group) is None}
    baselines = {
        _point(groups[key][0].cell): found for key, found in measured.items() if groups[key][0].cell["policy"] == "full"
    }
    return [_summary(group, measured.get(key), baselines) for key, group in groups.items()]


def _group_key(cell: Mapping[str, Any]) -> str:
    return canonical_json({name: value for name, value in cell.items() if name != "seed"})


def _point(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("task", "length_tokens", "max_new_tokens", "query_aware"))


def _failure(group: list[Row]) -> Row | None:
    return next((row for row in group if row.status != OK), None)


def _summary(group: list[Row], measured: Measured | None, baselines: Mapping[tuple[Any, ...], Measured]) -> CellSummary:
    cell, failed = Cell(**group[0].cell), _failure(group)
    baseline = baselines.get(_point(group[0].cell))
    interpretable = baseline is not None and baseline.score.mean >= _CANARY_SCORE
    if failed is not None:
        outcome = Outcome(failed.outcome or Outcome.UNMEASURED)
    else:
        outcome = _quality_outcome(measured, baseline) if interpretable else Outcome.UNMEASURED
    return CellSummary(
        cell=cell,
        status=OK if failed is None else failed.status,
        reason=None if failed is None else failed.reason,
        outcome=outcome,
        interpretable=interpretable,
        measured=measured,
    )


def _quality_outcome(measured: Measured | None, baseline: Measured | None) -> Outcome:
    """Degraded when the paired interval of the score lies below zero, or that of the NLL above it.

    Too few examples can show a loss, but not that there is none: those stay unmeasured.
    """
    if measured is None or baseline is None:
        return Outcome.UNMEASURED
    score = paired_difference(measured.scores, baseline.scores)
    nll = paired_difference(measured.nlls, baseline.nlls)
    if score is None or nll is None:
        return Outcome.UNMEASURED
    if score.high < 0 or nll.low > 0:
        return Outcome.QUALITY_DEGRADED
    return Outcome.QUALITY_VALID if measured.n >= VERDICT_FROM else Outcome.UNMEASURED


def _measure(group: list[Row]) -> Measured:
    quality = [row.quality for row in group if row.quality is not None]
    cache = [row.cache for row in group if row.cache is not None]
    timing = [row.timing for row in group if row.timing is not None]
    ids = [str(row.example["id"]) for row in group]
    nll = AnswerNLL(keep_in_memory=True).compute(
        predictions=[q.answer_nll for q in quality], references=[q.answer_tokens for q in quality]
    )
    nlls = [q.answer_nll for q in quality]
    return Measured(
        n=len(group),
        score=bootstrap_mean([q.score for q in quality]),
        answer_nll=bootstrap_mean(nlls),
        perplexity=nll["perplexity"],
        empty_outputs=sum(not q.output_text.strip() for q in quality),
        prompt_rows=_mean(c.prompt_rows_mean for c in cache),
        prompt_rows_min=min(c.prompt_rows_min for c in cache),
        prompt_rows_max=max(c.prompt_rows_max for c in cache),
        kept_ratio=_mean(c.kept_ratio for c in cache),
        measured_bytes=_mean(c.measured_bytes for c in cache),
        full_kv_bytes=_mean(c.full_kv_bytes for c in cache),
        prefill_s=_mean(t.prefill_s for t in timing),
        decode_ms_per_token=_mean(t.decode_ms_per_token for t in timing),
        scores=dict(zip(ids, (q.score for q in quality), strict=True)),
        nlls=dict(zip(ids, nlls, strict=True)),
        depths={
            str(row.example["id"]): float(row.example["depth_ratio"]) for row in group if "depth_ratio" in row.example
        },
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
