"""From rows to one summary a cell. Failed cells stay in the list, with a reason and without a score."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..contract.canonical import canonical_json
from .cells import Cell
from .metrics.answer_nll import AnswerNLL
from .outcomes import DEFAULT_DELTA, EQUALS_FULL, OK, Outcome, outcome_of_difference
from .records import Row
from .retention import MINIMUM_RANGE
from .statistics import SMOKE_BELOW, Interval, bootstrap_mean, mean_interval, paired_difference
from .sweep import REFERENCES
from .tasks.base import LIKELIHOOD

__all__ = ["CellSummary", "Measured", "by_cell", "summarise"]

# Below this the full cache itself cannot do the task, and a policy's score says nothing about the policy. Where the
# questions were asked without their text too, what lies between the two decides instead.
_CANARY_SCORE = 0.5
_NOT_INTERPRETABLE = "the full cache does not solve this task, or was not run"
_NO_FULL_CACHE = "there is no full cache to compare with: the checkpoint was trained for other rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over the examples of a cell that ran; rows are per layer and head after the prompt."""

    n: int
    score: Interval
    answer_nll: Interval
    perplexity: float
    # None where a row has none: it was made before they were measured.
    kl_to_full_nats: float | None
    top1_agreement_ratio: float | None
    empty_outputs: int
    prompt_rows: float
    prompt_rows_min: int
    prompt_rows_max: int
    # Mean over the forwards; None where a row has none.
    rows_over_time: float | None
    kept_ratio: float
    measured_bytes: float
    # K/V of live rows, and what a policy keeps beside them; slots without a row are left out.
    resident_bytes: float
    full_kv_bytes: float
    prefill_s: float
    decode_ms_per_token: float
    scores: Mapping[str, float]
    nlls: Mapping[str, float]
    # Digest of the prompt by example; None where a row has none.
    prompts: Mapping[str, str | None]
    # By example as the two above; empty for tasks that hide nothing at a depth.
    depths: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CellSummary:
    """One cell, seeds pooled. `measured` is None when any of its rows failed, or when it was not run.

    `reason` says why it failed, or why nothing can be said.
    """

    cell: Cell
    status: str
    reason: str | None
    outcome: Outcome
    interpretable: bool
    measured: Measured | None
    # Mean score of the same questions without their text, where that was run.
    floor_score: float | None = None

    @property
    def is_smoke(self) -> bool:
        """Whether there are too few examples for a claim."""
        return self.measured is None or self.measured.n < SMOKE_BELOW

    @property
    def has_failed(self) -> bool:
        """Whether it was run and gave no result."""
        return self.status not in (OK, EQUALS_FULL)


def summarise(rows: Iterable[Row], *, delta: float = DEFAULT_DELTA) -> list[CellSummary]:
    """Group rows by cell (seeds pooled) and summarise each, in the order in which cells first appear.

    `delta` is the loss of score that is still held to be none.
    """
    groups = by_cell(rows)
    measured = {key: _measure(group) for key, group in groups.items() if _unfinished(group) is None}
    ends = {
        (policy, _point(groups[key][0].cell)): found
        for key, found in measured.items()
        # A full cache with options is one of those that are measured by the full cache.
        if (policy := groups[key][0].cell["policy"]) in REFERENCES and not groups[key][0].cell["options"]
    }
    refused = {
        _point(group[0].cell)
        for group in groups.values()
        if group[0].cell["policy"] == "full" and group[0].outcome == Outcome.CHECKPOINT_INCOMPATIBLE
    }
    return [
        _summary(
            group,
            measured.get(key),
            ends,
            delta,
            without_full=_NO_FULL_CACHE if _point(group[0].cell) in refused else _NOT_INTERPRETABLE,
        )
        for key, group in groups.items()
    ]


def by_cell(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by what their cells ask for, seeds pooled, in the order in which cells first appear."""
    groups: dict[str, list[Row]] = defaultdict(list)
    for row in rows:
        groups[_group_key(row.cell)].append(row)
    return groups


def _group_key(cell: Mapping[str, Any]) -> str:
    return canonical_json({name: value for name, value in cell.items() if name != "seed"})


def _point(cell: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(cell[name] for name in ("task", "length_tokens", "max_new_tokens", "query_aware"))


def _unfinished(group: list[Row]) -> Row | None:
    """The first row that has no result: it failed, or else there was nothing to run."""
    missing = [row for row in group if row.status != OK]
    return next((row for row in missing if row.status != EQUALS_FULL), missing[0] if missing else None)


def _why_unfinished(group: list[Row], unfinished: Row) -> tuple[Outcome, str | None]:
    """What became of a cell with such a row; equal to the full cache it is only where no prompt loses a row."""
    equal = sum(row.status == EQUALS_FULL for row in group)
    if unfinished.status == EQUALS_FULL and equal < len(group):
        reason = (
            f"the budget takes nothing from {equal} of {len(group)} prompts, which were not run; run them here again"
        )
        return Outcome.UNMEASURED, reason
    return Outcome(unfinished.outcome or Outcome.UNMEASURED), unfinished.reason


def _summary(
    group: list[Row],
    measured: Measured | None,
    ends: Mapping[tuple[str, tuple[Any, ...]], Measured],
    delta: float,
    *,
    without_full: str,
) -> CellSummary:
    cell, unfinished = Cell(**group[0].cell), _unfinished(group)
    baseline, floor = (ends.get((policy, _point(group[0].cell))) for policy in REFERENCES)
    # A likelihood has no score that the full cache ought to reach.
    has_canary = group[0].example.get("metric") != LIKELIHOOD
    interpretable = baseline is not None and (not has_canary or _needs_its_context(baseline, floor))
    if unfinished is not None:
        outcome, reason = _why_unfinished(group, unfinished)
    elif not interpretable or measured is None or baseline is None:
        outcome, reason = Outcome.UNMEASURED, without_full
    else:
        outcome, reason = _quality_outcome(measured, baseline, delta, is_likelihood=not has_canary)
    return CellSummary(
        cell=cell,
        status=OK if unfinished is None else unfinished.status,
        reason=reason,
        outcome=outcome,
        interpretable=interpretable,
        measured=measured,
        floor_score=None if floor is None else floor.score.mean,
    )


def _needs_its_context(full: Measured, floor: Measured | None) -> bool:
    """Whether the full cache solves the task by reading: well above no context where that was run, else well at all."""
    if floor is None:
        return full.score.mean >= _CANARY_SCORE
    return round(full.score.mean - floor.score.mean, 9) >= MINIMUM_RANGE


def _quality_outcome(
    measured: Measured, baseline: Measured, delta: float, *, is_likelihood: bool
) -> tuple[Outcome, str | None]:
    """Compared with the full cache example by example; the full cache itself is what the others are measured by.

    A likelihood is compared in nats per token: as a share, which is its score, it is small whatever is lost.
    """
    if measured is baseline:
        return Outcome.QUALITY_VALID, None
    ours, full = (
        {key: -nll for key, nll in found.nlls.items()} if is_likelihood else found.scores
        for found in (measured, baseline)
    )
    difference = paired_difference(ours, full)
    if difference is None:
        return Outcome.UNMEASURED, "no example that the full cache has as well"
    outcome = outcome_of_difference(difference, delta)
    return outcome, f"inconclusive at n = {difference.n}" if outcome is Outcome.UNMEASURED else None


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
        score=mean_interval([q.score for q in quality]),
        answer_nll=bootstrap_mean(nlls),
        perplexity=nll["perplexity"],
        kl_to_full_nats=_mean_if_all(q.kl_to_full_nats for q in quality),
        top1_agreement_ratio=_mean_if_all(q.top1_agreement_ratio for q in quality),
        empty_outputs=sum(not q.output_text.strip() for q in quality),
        prompt_rows=_mean(c.prompt_rows_mean for c in cache),
        prompt_rows_min=min(c.prompt_rows_min for c in cache),
        prompt_rows_max=max(c.prompt_rows_max for c in cache),
        rows_over_time=_mean_if_all(c.rows_over_time_mean for c in cache),
        kept_ratio=_mean(c.kept_ratio for c in cache),
        measured_bytes=_mean(c.measured_bytes for c in cache),
        resident_bytes=_mean(c.measured_bytes - c.slack_bytes for c in cache),
        full_kv_bytes=_mean(c.full_kv_bytes for c in cache),
        prefill_s=_mean(t.prefill_s for t in timing),
        decode_ms_per_token=_mean(t.decode_ms_per_token for t in timing),
        scores=dict(zip(ids, (q.score for q in quality), strict=True)),
        nlls=dict(zip(ids, nlls, strict=True)),
        prompts={str(row.example["id"]): row.example.get("prompt_sha256") for row in group},
        depths={
            str(row.example["id"]): float(row.example["depth_ratio"]) for row in group if "depth_ratio" in row.example
        },
    )


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _mean_if_all(values: Iterable[float | None]) -> float | None:
    found = list(values)
    known = [value for value in found if value is not None]
    return _mean(known) if known and len(known) == len(found) else None
