"""The coordinates of a result: everything its number depends on (0x10B-0x10E), read from rows and the run's record.

What a record does not hold is `unrecorded`, never guessed. The value names the run: within one run what is not recorded
of it is the same for all results, and between runs nobody knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..allocation.budget import parse_budget
from ..contract.canonical import FrozenMapping, sha256_of
from .policy_coordinates import budget_denominator
from .records import CacheRecord, Row

__all__ = [
    "ACHIEVED",
    "CHECKPOINT",
    "KEYS",
    "POLICY",
    "PROVENANCE",
    "RUNTIME",
    "WORKLOAD",
    "coordinates_of",
    "is_unrecorded",
]

CHECKPOINT = ("model", "weights_sha256", "config_sha256", "tokenizer_sha256", "positional_contract")
WORKLOAD = (
    "task",
    "task_source_sha256",
    "metric",
    "uses_chat_template",
    "template_sha256",
    "template_preamble",
    "added_bos_tokens",
    "prompts_sha256",
    "example_ids_sha256",
    "n",
    "seeds",
    "length_tokens",
    "prompt_tokens",
    "max_new_tokens",
    "distance_tokens",
    "query_aware",
    "truncated_examples",
    "decode_mode",
    "nll_mode",
)
POLICY = (
    "policy",
    "options",
    "retained_object",
    "representation",
    "semantic_class",
    "recoverability",
    "phase",
    "cadence",
    "owner",
    "unit",
    "group",
    "evidence",
    "budget",
    "budget_unit",
    "budget_scope",
    "budget_denominator",
    "matched_to",
    "allocation",
    "storage",
    "calibration_sha256",
    "key_position_stage",
    "attention_positions",
    "manifest_sha256",
)
ACHIEVED = (
    "prompt_rows_mean",
    "prompt_rows_min",
    "prompt_rows_max",
    "final_rows_mean",
    "rows_over_time_mean",
    "kept_ratio",
    "payload_bytes",
    "side_bytes",
    "resident_bytes",
    "slack_bytes",
    "full_kv_bytes",
    "transient_peak_bytes",
)
RUNTIME = (
    "dtype",
    "device",
    "hardware",
    "backend",
    "versions",
    "threads",
    "jobs",
    "batch_size",
    "parallelism",
    "prefill_run",
)
PROVENANCE = ("evidence_class", "sweep_sha256", "run_sha256")
KEYS = (*CHECKPOINT, *WORKLOAD, *POLICY, *ACHIEVED, *RUNTIME, *PROVENANCE)

_UNRECORDED = "unrecorded"
_DIFFERS = "differs within the cell"
_OF_EXAMPLES = ("prompt_tokens", "distance_tokens")
_OF_PROMPTS = ("template_preamble", "added_bos_tokens")


def coordinates_of(rows: Sequence[Row], run: Mapping[str, Any]) -> Mapping[str, Any]:
    """The coordinates of one cell's rows, seeds pooled, under the record of their run; one value for each of `KEYS`."""
    run_sha256 = sha256_of(run)
    known = {
        **_of_run(run),
        **_of_place(rows, run),
        **_of_workload(rows, run),
        **_of_policy(rows),
        **_achieved([row.cache for row in rows if row.cache is not None]),
        "run_sha256": run_sha256,
    }
    unrecorded = f"{_UNRECORDED} in run {run_sha256[:12]}"
    return FrozenMapping({key: known.get(key, unrecorded) for key in KEYS}, where="coordinates")


def is_unrecorded(value: Any) -> bool:
    """Whether this is the value of a coordinate that no record holds."""
    return isinstance(value, str) and value.startswith(_UNRECORDED)


def _of_run(run: Mapping[str, Any]) -> dict[str, Any]:
    """What the whole run shares, from its record and the identity in it."""
    flat = {**run, **run.get("identity", {})}
    return {key: flat[key] for key in (*CHECKPOINT, *WORKLOAD, *RUNTIME, *PROVENANCE) if key in flat}


def _of_place(rows: Sequence[Row], run: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, hardware and threads of where the rows ran; what differs among them is a value of its own."""
    known = run.get("environments", {})
    places = [known[key] for key in sorted({row.environment for row in rows}) if key in known]
    if not places:
        return {}
    named = ("device", "hardware", "backend", "threads", "jobs", "batch_size", "instructions", "cores")
    found: dict[str, Any] = {key: [place.get(key) for place in places] for key in named if key in places[0]}
    # A prompt that was run once for many caches, and one that the cache ran itself, do not compare in time.
    timed = [row.timing for row in rows if row.timing is not None]
    found["prefill_run"] = ["own" if timing.selection_s is None else "shared" for timing in timed]
    found["versions"] = [{key: value for key, value in place.items() if key not in named} for place in places]
    return {
        key: values[0] if all(value == values[0] for value in values) else _DIFFERS
        for key, values in found.items()
        if key in RUNTIME and values
    }


def _of_workload(rows: Sequence[Row], run: Mapping[str, Any]) -> dict[str, Any]:
    cell, examples = rows[0].cell, sorted((row.example for row in rows), key=lambda example: str(example["id"]))
    found = {
        **{key: cell[key] for key in ("task", "length_tokens", "max_new_tokens", "query_aware")},
        "n": len(rows),
        "seeds": sorted({row.cell["seed"] for row in rows}),
        "example_ids_sha256": sha256_of([str(example["id"]) for example in examples]),
        "truncated_examples": sum(bool(example.get("truncated")) for example in examples),
    }
    if cell["task"] in run.get("tasks", {}):
        found["task_source_sha256"] = sha256_of(run["tasks"][cell["task"]])
    if all("prompt_sha256" in example for example in examples):
        found["prompts_sha256"] = sha256_of([example["prompt_sha256"] for example in examples])
    if all("metric" in example for example in examples):
        found["metric"] = ", ".join(sorted({example["metric"] for example in examples}))
    for key in _OF_PROMPTS:
        values = {example.get(key) for example in examples}
        if None not in values:
            found[key] = values.pop() if len(values) == 1 else _DIFFERS
    for key in _OF_EXAMPLES:
        if all(key in example for example in examples):
            found[key] = _span([example[key] for example in examples])
    return found


def _of_policy(rows: Sequence[Row]) -> dict[str, Any]:
    """What the cell asks for, and what its caches declared where the rows hold it."""
    cell = rows[0].cell
    unit = "none" if cell["budget"] is None else parse_budget(cell["budget"]).kind
    asked = {
        "policy": cell["policy"],
        "options": cell["options"],
        "budget": cell["budget"],
        "budget_unit": unit,
        "budget_denominator": budget_denominator(unit),
        "matched_to": cell.get("matched_to") or "none",
    }
    # Caches of one cell declare the same, but for the budgets of a cell that gets the rows of another.
    manifests = sorted({row.cache.manifest_sha256 for row in rows if row.cache is not None})
    if manifests:
        asked["manifest_sha256"] = manifests[0] if len(manifests) == 1 else _DIFFERS
    # Rows of before policies were declared have none.
    declared = rows[0].policy
    return {**asked, **{key: declared[key] for key in POLICY if key in declared}}


def _achieved(caches: Sequence[CacheRecord]) -> dict[str, Any]:
    """Means over the examples, right after the prompt but for `final_rows_mean` and the peak."""
    if not caches:
        return {}
    means = ("final_rows_mean", "kept_ratio", "payload_bytes", "slack_bytes", "full_kv_bytes")
    over_time = [cache.rows_over_time_mean for cache in caches if cache.rows_over_time_mean is not None]
    resident = _mean(cache.measured_bytes - cache.slack_bytes for cache in caches)
    return {
        "prompt_rows_mean": _mean(cache.prompt_rows_mean for cache in caches),
        "prompt_rows_min": min(cache.prompt_rows_min for cache in caches),
        "prompt_rows_max": max(cache.prompt_rows_max for cache in caches),
        **{name: _mean(getattr(cache, name) for cache in caches) for name in means},
        **({"rows_over_time_mean": _mean(over_time)} if len(over_time) == len(caches) else {}),
        "resident_bytes": resident,
        "side_bytes": resident - _mean(cache.payload_bytes for cache in caches),
        "transient_peak_bytes": max(cache.transient_peak_bytes for cache in caches),
    }


def _span(values: Sequence[int]) -> str:
    return f"{_mean(values):.1f} ({min(values)}-{max(values)})"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)
