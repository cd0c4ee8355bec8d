"""Pairs of results: the paired difference where one is allowed, else the reason why it is not."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .cells import same_rows
from .comparison import Comparability, Metric, compare, metric_named
from .pairing import BASELINES
from .results import Result
from .statistics import Difference, holm, paired_difference, paired_p_value, verdict

__all__ = ["Comparison", "comparisons", "pairs_to_compare"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One pair by one metric. Without `difference` it is not comparable; `adjusted_p` is Holm's over the table."""

    ours: Result
    theirs: Result
    metric: str
    comparability: Comparability
    difference: Difference | None = None
    p: float | None = None
    adjusted_p: float | None = None

    @property
    def verdict(self) -> str:
        """What may be said of the pair."""
        if self.difference is None or self.adjusted_p is None:
            return str(self.comparability)
        return verdict(self.difference, adjusted_p=self.adjusted_p, margin=metric_named(self.metric).margin)


def pairs_to_compare(results: Sequence[Result], *, every: bool = False) -> list[tuple[Result, Result]]:
    """Pairs of results of one task and length, the baseline second.

    Every policy with the full cache, and with `random` and the newest rows at its own declared budget; of two runs also
    each cell with its namesake. Results without a number are left out.

    Args:
        results: of one run or several.
        every: take all pairs of one task and length.
    """
    measured = [result for result in results if result.summary.measured is not None]
    if every:
        return [(b, a) for a, b in itertools.combinations(measured, 2) if _point(a) == _point(b)]
    chosen = (*_with_baselines(measured), *_with_namesakes(measured))
    return list({(id(a), id(b)): (a, b) for a, b in chosen}.values())


def comparisons(pairs: Iterable[tuple[Result, Result]], metric: str) -> list[Comparison]:
    """Compare each pair by a metric, and adjust the p-values of all comparable ones together.

    Raises:
        ConfigError: there is no such metric.
    """
    found = [_compared(ours, theirs, metric_named(metric)) for ours, theirs in pairs]
    allowed = [item for item in found if item.p is not None]
    adjusted = dict(zip(map(id, allowed), holm([item.p for item in allowed if item.p is not None]), strict=True))
    return [_adjusted(item, adjusted.get(id(item))) for item in found]


def _point(result: Result) -> tuple[str, int]:
    return result.summary.cell.task, result.summary.cell.length_tokens


def _with_baselines(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    for ours, theirs in itertools.product(results, repeat=2):
        mine, other = ours.summary.cell, theirs.summary.cell
        same_budget = other.is_full or (other.policy != "full" and same_rows(mine, other))
        is_baseline = other.policy in BASELINES and not mine.is_full and (other.is_full or mine.policy != other.policy)
        if is_baseline and same_budget and _point(ours) == _point(theirs) and ours.source == theirs.source:
            yield ours, theirs


def _with_namesakes(results: Sequence[Result]) -> Iterator[tuple[Result, Result]]:
    for first, second in itertools.combinations(results, 2):
        if first.source != second.source and first.label == second.label and _point(first) == _point(second):
            yield second, first


def _compared(ours: Result, theirs: Result, metric: Metric) -> Comparison:
    comparability = compare(ours.coordinates, theirs.coordinates, metric.name)
    values = metric.values(ours), metric.values(theirs)
    difference = paired_difference(*values) if comparability.relation != "not comparable" else None
    return Comparison(
        ours=ours,
        theirs=theirs,
        metric=metric.name,
        comparability=comparability,
        difference=difference,
        p=None if difference is None else paired_p_value(*values),
    )


def _adjusted(item: Comparison, adjusted_p: float | None) -> Comparison:
    return item if adjusted_p is None else replace(item, adjusted_p=adjusted_p)
