"""Which results may be compared, by which metric, and why not (0x0FE, 0x10B).

Every metric names the coordinates that must be equal. Policy, budget, phase, cadence, owner, unit and representation
are never among them: they are what is compared. Equal digests of some parts are lineage, not comparability.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import ConfigError, NotComparableError, did_you_mean
from .coordinates import KEYS, is_unrecorded
from .records import Row
from .results import Result
from .statistics import MARGIN

__all__ = [
    "BYTES_TOLERANCE",
    "METRICS",
    "Comparability",
    "Disagreement",
    "Metric",
    "compare",
    "differing",
    "lineage",
    "metric_named",
    "rank",
]

# Budgets in whole rows cannot meet a number of bytes exactly.
BYTES_TOLERANCE = 0.02
_BYTES_PER_MIB = 2**20

_SAME_PROMPTS = (
    "weights_sha256",
    "config_sha256",
    "tokenizer_sha256",
    "task",
    "task_source_sha256",
    "uses_chat_template",
    "template_sha256",
    "prompts_sha256",
    "example_ids_sha256",
    "n",
    "seeds",
    "length_tokens",
    "prompt_tokens",
    "query_aware",
    "truncated_examples",
    "dtype",
    "evidence_class",
)
_QUALITY = (*_SAME_PROMPTS, "metric", "max_new_tokens", "decode_mode", "nll_mode", "backend")
_BYTES = (*_SAME_PROMPTS, "batch_size")
_TIME = (*_QUALITY, "device", "hardware", "parallelism", "threads", "jobs", "batch_size", "versions", "prefill_run")
_LINEAGE = ("weights_sha256", "manifest_sha256", "sweep_sha256", "run_sha256", "task", "example_ids_sha256")


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """A number of every row, and the coordinates that must be equal where two such numbers are compared.

    `margin` is how large a difference is held to be none.
    """

    name: str
    unit: str
    read: Callable[[Row], float | None]
    requires: tuple[str, ...]
    requires_equal_bytes: bool
    lower_is_better: bool
    margin: float = 0.0

    def values(self, result: Result) -> dict[str, float]:
        """The number of every example that has one, by the example's id."""
        found = ((str(row.example["id"]), self.read(row)) for row in result.rows)
        return {key: value for key, value in found if value is not None}


def _score(row: Row) -> float | None:
    return None if row.quality is None else row.quality.score


def _nll(row: Row) -> float | None:
    return None if row.quality is None else row.quality.answer_nll


def _resident_mib(row: Row) -> float | None:
    """K/V of live rows and what a policy keeps beside them, at the end of the prompt; slack is left out."""
    return None if row.cache is None else (row.cache.measured_bytes - row.cache.slack_bytes) / _BYTES_PER_MIB


def _prefill(row: Row) -> float | None:
    return None if row.timing is None else row.timing.prefill_s


def _decode(row: Row) -> float | None:
    return None if row.timing is None else row.timing.decode_ms_per_token


METRICS: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric(
            name="score",
            unit="score",
            read=_score,
            requires=_QUALITY,
            requires_equal_bytes=True,
            lower_is_better=False,
            margin=MARGIN,
        ),
        Metric(
            name="nll",
            unit="nats per token",
            read=_nll,
            requires=_QUALITY,
            requires_equal_bytes=True,
            lower_is_better=True,
            margin=MARGIN,
        ),
        Metric(
            name="bytes",
            unit="MiB",
            read=_resident_mib,
            requires=_BYTES,
            requires_equal_bytes=False,
            lower_is_better=True,
        ),
        Metric(
            name="prefill", unit="s", read=_prefill, requires=_TIME, requires_equal_bytes=True, lower_is_better=True
        ),
        Metric(
            name="decode",
            unit="ms/token",
            read=_decode,
            requires=_TIME,
            requires_equal_bytes=True,
            lower_is_better=True,
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disagreement:
    """One coordinate and its two values."""

    key: str
    ours: Any
    theirs: Any

    def __str__(self) -> str:
        """Draw it, digests shortened."""
        if is_unrecorded(self.ours) or is_unrecorded(self.theirs):
            return f"{self.key}: not recorded"
        return f"{self.key}: {_short(self.ours)} / {_short(self.theirs)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparability:
    """Whether two results may be compared by a metric; if not, all that differs.

    A `reference` is a full cache beside one that drops rows: the difference says what was lost, at bytes that differ by
    intent. It is no ranking.
    """

    metric: str
    relation: Literal["comparable", "reference", "not comparable"]
    differing: tuple[Disagreement, ...]

    def __str__(self) -> str:
        """Say it in words."""
        if not self.differing:
            return self.relation
        return f"{self.relation} by {self.metric}: " + "; ".join(map(str, self.differing))


def metric_named(name: str) -> Metric:
    """The metric of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in METRICS:
        raise ConfigError(
            f"There is no metric {name!r} to compare by; there are {', '.join(METRICS)}.{did_you_mean(name, METRICS)}"
        )
    return METRICS[name]


def compare(ours: Mapping[str, Any], theirs: Mapping[str, Any], metric: str) -> Comparability:
    """Whether the results with these coordinates may be compared by a metric.

    Args:
        ours: coordinates of one result.
        theirs: coordinates of the other.
        metric: a key of `METRICS`.

    Raises:
        ConfigError: there is no such metric.
    """
    wanted = metric_named(metric)
    found = differing(ours, theirs, wanted.requires)
    is_reference = wanted.requires_equal_bytes and _is_full(ours) != _is_full(theirs)
    if wanted.requires_equal_bytes and not is_reference:
        found += _unequal_sizes(ours, theirs)
    relation: Literal["comparable", "reference", "not comparable"] = "reference" if is_reference else "comparable"
    return Comparability(metric=metric, relation="not comparable" if found else relation, differing=found)


def differing(
    ours: Mapping[str, Any], theirs: Mapping[str, Any], keys: Sequence[str] = KEYS
) -> tuple[Disagreement, ...]:
    """The coordinates among `keys` whose values are not equal."""
    return tuple(Disagreement(key=key, ours=ours[key], theirs=theirs[key]) for key in keys if ours[key] != theirs[key])


def lineage(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[str, ...]:
    """What both come from. It makes no number of theirs comparable."""
    return tuple(key for key in _LINEAGE if ours[key] == theirs[key])


def rank(results: Sequence[Result], metric: str) -> list[Result]:
    """Results by their mean, best first.

    The order is that of means; whether two neighbours differ is what their paired interval says.

    Raises:
        NotComparableError: two of them are not comparable by this metric, or one has no result.
    """
    wanted = metric_named(metric)
    for result in results:
        if result.summary.measured is None:
            raise NotComparableError(
                f"{result.label} has no result ({result.summary.status}), so it has no place in a ranking. "
                "Leave it out."
            )
    for ours, theirs in itertools.combinations(results, 2):
        found = compare(ours.coordinates, theirs.coordinates, metric)
        if found.relation != "comparable":
            why = "one is the full cache, and the other holds fewer bytes" if not found.differing else str(found)
            raise NotComparableError(
                f"{ours.label} and {theirs.label} cannot be ranked by {metric}: {why}. Rank results that differ only "
                "in policy and budget, at equal bytes."
            )
    means = {id(result): _mean(wanted.values(result)) for result in results}
    return sorted(results, key=lambda result: means[id(result)], reverse=not wanted.lower_is_better)


def _mean(values: Mapping[str, float]) -> float:
    return sum(values.values()) / len(values)


def _is_full(coordinates: Mapping[str, Any]) -> bool:
    kept_whole = coordinates["policy"] == "full" and coordinates["semantic_class"] != "lossy_quantized"
    return bool(kept_whole or coordinates["semantic_class"] == "full_cache_exact")


def _unequal_sizes(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[Disagreement, ...]:
    """What two results hold, where it is not the same: bytes after the prompt, or what one is matched by."""
    if _gets_rows_of(ours, theirs) or _gets_rows_of(theirs, ours):
        key, sizes = "rows_over_time", (_rows_of_same_bytes(ours), _rows_of_same_bytes(theirs))
    else:
        key, sizes = "resident_bytes", (ours["resident_bytes"], theirs["resident_bytes"])
    return () if _are_close(*sizes) else (Disagreement(key=key, ours=sizes[0], theirs=sizes[1]),)


def _gets_rows_of(matched: Mapping[str, Any], source: Mapping[str, Any]) -> bool:
    return bool(matched["matched_to"] == {key: source[key] for key in ("policy", "options", "budget")})


def _rows_of_same_bytes(coordinates: Mapping[str, Any]) -> Any:
    """Rows held over time, as many of the model's own as take the same bytes: what a cell is matched by."""
    names = ("rows_over_time_mean", "payload_bytes", "full_kv_bytes", "kept_ratio")
    values = [coordinates[name] for name in names]
    unknown = next((value for value in values if is_unrecorded(value)), None)
    if unknown is not None:
        return unknown
    rows, payload, full, kept = values
    return rows * payload / (full * kept)


def _are_close(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, int | float) or not isinstance(theirs, int | float):
        return False
    return abs(ours - theirs) <= BYTES_TOLERANCE * max(ours, theirs)


def _short(value: Any) -> str:
    text = f"{value:,.0f}" if isinstance(value, float) else str(value)
    return text[:12] if len(text) == 64 and " " not in text else text
