"""What a policy gains or loses against simple ones, example by example at the same budget."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .cells import same_rows
from .statistics import Interval, paired_difference
from .summary import CellSummary

__all__ = ["BASELINES", "Pair", "pairs"]

# The full cache has no budget and is compared with at every one. A policy that does not beat the newest rows, or rows
# drawn at random, has found nothing in its scores.
BASELINES = ("full", "sliding_window", "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Differences `ours - baseline` over the examples both have; a lower NLL is better."""

    summary: CellSummary
    baseline: str
    n: int
    score: Interval
    answer_nll: Interval


def pairs(summaries: Iterable[CellSummary]) -> list[Pair]:
    """Compare every measured cell with the baselines of its task, length and budget; first come the cells.

    A cell that others are matched to is compared with them, and they with one another. What was asked with
    another prompt (`no_context`) has no pair.

    A baseline that ran with several option sets is represented by its first.
    """
    cells = list(summaries)
    found = [_pair(ours, _baseline_of(ours, name, cells)) for ours in cells for name in BASELINES]
    return [pair for pair in found if pair is not None]


def _baseline_of(ours: CellSummary, name: str, cells: Iterable[CellSummary]) -> CellSummary | None:
    """The cell of that policy at the same point, unless it is the same policy: one that is matched before others."""
    cell = ours.cell
    if cell.policy == name and (name != "full" or cell.is_full):
        return None
    point = ("task", "length_tokens", "max_new_tokens", "query_aware")
    there = [
        other
        for other in cells
        if other.cell.policy == name and all(getattr(other.cell, key) == getattr(cell, key) for key in point)
    ]
    there = [other for other in there if (other.cell.is_full if name == "full" else same_rows(cell, other.cell))]
    return min(there, key=lambda other: other.cell.matched_to is None, default=None)


def _pair(ours: CellSummary, baseline: CellSummary | None) -> Pair | None:
    if baseline is None or ours.measured is None or baseline.measured is None:
        return None
    score = paired_difference(ours.measured.scores, baseline.measured.scores)
    nll = paired_difference(ours.measured.nlls, baseline.measured.nlls)
    if score is None or nll is None:
        return None
    shared = ours.measured.scores.keys() & baseline.measured.scores.keys()
    if any(ours.measured.prompts[key] != baseline.measured.prompts[key] for key in shared):
        return None
    return Pair(summary=ours, baseline=baseline.cell.policy, n=len(shared), score=score, answer_nll=nll)
