"""Sweep files: which model, tasks, policies and budgets; checked whole before any model is loaded."""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..allocation.budget import parse_budget
from ..contract.canonical import canonical_json
from ..errors import ConfigError, ManifestError, did_you_mean
from . import fields
from .model_loading import DTYPES
from .outcomes import DEFAULT_DELTA
from .tasks.registry import make_task

__all__ = [
    "NO_CONTEXT",
    "REFERENCES",
    "BudgetValue",
    "ModelSpec",
    "PolicySpec",
    "SweepConfig",
    "TaskSpec",
    "load_sweep",
    "parse_sweep",
    "shipped_sweeps",
]

BudgetValue: TypeAlias = "int | float | str | None"

# The full cache asked without the text: what a score is worth begins here.
NO_CONTEXT = "no_context"
# What policies are measured by; neither drops a row.
REFERENCES = ("full", NO_CONTEXT)

_SWEEP_KEYS = (
    "model",
    "tasks",
    "policies",
    "budgets",
    "seeds",
    "query_aware",
    "max_new_tokens",
    "threads",
    "jobs",
    "include_random",
    "floor",
    "share_prefill",
    "delta",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Arguments of `model_loading.load_model`."""

    name: str
    dtype: str = "auto"
    device: str = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """One task at several lengths; every length is seen at every depth.

    `max_new_tokens` is the sweep's, or the task's own where the sweep says nothing.
    """

    name: str
    lengths_tokens: tuple[int, ...]
    depths: tuple[float, ...]
    num_examples: int
    max_new_tokens: int
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySpec:
    """One policy: fixed `options`, a `grid` of option values to cross, and the budgets to run it at.

    Every one of its cells is followed by the policies `matched`, with their defaults, at the rows it held.
    """

    name: str
    budgets: tuple[BudgetValue, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    matched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepConfig:
    """A checked sweep. `document` is the plain mapping it came from, overrides applied."""

    model: ModelSpec
    tasks: tuple[TaskSpec, ...]
    policies: tuple[PolicySpec, ...]
    seeds: tuple[int, ...]
    query_aware: tuple[bool, ...]
    threads: int
    jobs: int
    share_prefill: bool
    # The loss of score against the full cache that is still held to be none.
    delta: float
    document: Mapping[str, Any]


def load_sweep(path: Path, overrides: Mapping[str, Any] | None = None) -> SweepConfig:
    """Read a sweep file and apply dotted overrides such as `{"tasks.0.num_examples": 5}`.

    Args:
        path: a YAML file, or the bare name of a sweep that comes with the package.
        overrides: values by dotted key.

    Raises:
        ConfigError: the file is missing, is no mapping, or any key or value in it is not accepted.
    """
    document = _read(path)
    for dotted, value in (overrides or {}).items():
        fields.set_dotted(document, dotted, value)
    return parse_sweep(document)


def shipped_sweeps() -> tuple[str, ...]:
    """Return the names of the sweeps that come with the package, sorted."""
    folder = importlib.resources.files("hf_kvpolicy.configs").joinpath("sweeps")
    names = [entry.name for entry in folder.iterdir()]
    return tuple(sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml")))


def _read(path: Path) -> dict[str, Any]:
    """Read a file, or the shipped sweep of that bare name; a file of the same name wins."""
    name = str(path)
    if path.is_file() or path.name != name or path.suffix:
        return fields.read_yaml_mapping(path)
    document = fields.shipped_config(f"sweeps/{name}.yaml")
    if document is None:
        names = shipped_sweeps()
        raise ConfigError(
            f"There is no sweep file {name!r}, and no shipped sweep of that name; shipped are {', '.join(names)}."
            f"{did_you_mean(name, names)}"
        )
    return document


def parse_sweep(document: Mapping[str, Any]) -> SweepConfig:
    """Check a sweep's plain mapping and return it as records.

    Raises:
        ConfigError: an unknown key (with a suggestion), a missing one, or a value of the wrong kind.
    """
    fields.check_keys(document, _SWEEP_KEYS, required=("model", "tasks", "policies"), where="the sweep")
    budgets = _budgets(document.get("budgets", []), where="budgets")
    policies = [_policy(item, budgets, i) for i, item in enumerate(fields.items(document, "policies"))]
    tasks = [_task(item, i, document) for i, item in enumerate(fields.items(document, "tasks"))]
    _check_told_apart(tasks)
    return SweepConfig(
        model=_model(document["model"]),
        tasks=tuple(tasks),
        policies=_with_baselines(
            policies,
            budgets,
            include_random=fields.boolean(document.get("include_random", True), where="include_random"),
            floor=fields.boolean(document.get("floor", False), where="floor"),
        ),
        seeds=_integers(document.get("seeds", [0]), where="seeds", minimum=0),
        query_aware=_query_aware(document.get("query_aware", True)),
        threads=fields.integer(document.get("threads", 1), where="threads", minimum=1),
        jobs=fields.integer(document.get("jobs", 1), where="jobs", minimum=1),
        share_prefill=fields.boolean(document.get("share_prefill", True), where="share_prefill"),
        delta=_delta(document.get("delta", DEFAULT_DELTA)),
        document=dict(document),
    )


def _model(value: Any) -> ModelSpec:
    if isinstance(value, str):
        shipped = fields.shipped_config(f"models/{value}.yaml")
        value = shipped if shipped is not None else {"name": value}
    fields.check_keys(value, ("name", "dtype", "device"), required=("name",), where="model")
    spec = ModelSpec(**{key: fields.text(item, where=f"model.{key}") for key, item in value.items()})
    if spec.dtype not in DTYPES:
        raise ConfigError(
            f"Model dtype {spec.dtype!r} is not one of {', '.join(DTYPES)}.{did_you_mean(spec.dtype, DTYPES)}"
        )
    return spec


def _integers(value: Any, *, where: str, minimum: int) -> tuple[int, ...]:
    found = fields.integers(value, where=where, minimum=minimum)
    fields.distinct(found, where=where)
    return tuple(found)


def _check_told_apart(tasks: list[TaskSpec]) -> None:
    """Refuse entries whose examples would lie in one cell: a cell names neither a task's parameters nor its depths."""
    before: dict[str, TaskSpec] = {}
    asked: list[tuple[str, int, int]] = []
    for index, task in enumerate(tasks):
        if dict(before.setdefault(task.name, task).params) != dict(task.params):
            raise ConfigError(
                f"tasks[{index}] asks for {task.name!r} with other params than an entry before it; their results could "
                "not be told apart. Run it as a sweep of its own, into another folder."
            )
        asked += [(task.name, length, task.max_new_tokens) for length in task.lengths_tokens]
    fields.distinct(asked, where="tasks (name, tokens, max_new_tokens)")


def _task(value: Any, index: int, sweep: Mapping[str, Any]) -> TaskSpec:
    where = f"tasks[{index}]"
    allowed = ("name", "lengths_tokens", "depths", "num_examples", "max_new_tokens", "params")
    fields.check_keys(value, allowed, required=("name", "lengths_tokens"), where=where)
    params = fields.mapping(value.get("params", {}), where=f"{where}.params")
    name = fields.text(value["name"], where=f"{where}.name")
    task = make_task(name, params)  # refuses an unknown name, with a suggestion
    return TaskSpec(
        name=name,
        lengths_tokens=_integers(value["lengths_tokens"], where=f"{where}.lengths_tokens", minimum=1),
        depths=_depths(value.get("depths", list(task.depths)), task.depths, where),
        num_examples=fields.integer(value.get("num_examples", 10), where=f"{where}.num_examples", minimum=1),
        max_new_tokens=_max_new_tokens(value, sweep, task.max_new_tokens, where),
        params=params,
    )


def _max_new_tokens(value: Mapping[str, Any], sweep: Mapping[str, Any], own: int, where: str) -> int:
    """The task's entry, the sweep's, or the task's own; 0 for a task that generates nothing."""
    if own == 0:
        if value.get("max_new_tokens", 0) != 0:
            raise ConfigError(f"{where} generates nothing, so it takes no max_new_tokens. Leave the key out.")
        return 0
    return fields.integer(
        value.get("max_new_tokens", sweep.get("max_new_tokens", own)), where="max_new_tokens", minimum=1
    )


def _depths(value: Any, default: tuple[float, ...], where: str) -> tuple[float, ...]:
    """Depths of a task that hides something at a depth; none of one that does not."""
    if not default:
        if value:
            raise ConfigError(f"{where} hides nothing at a depth, so it takes no depths. Leave the key out.")
        return ()
    are_numbers = isinstance(value, list) and all(
        isinstance(item, int | float) and not isinstance(item, bool) for item in value
    )
    if not are_numbers or not value or not all(0.0 <= depth <= 1.0 for depth in value):
        raise ConfigError(f"{where}.depths must be a list of one or more ratios in [0, 1]; got {value!r}.")
    depths = tuple(float(depth) for depth in value)
    fields.distinct(depths, where=f"{where}.depths")
    return depths


def _query_aware(value: Any) -> tuple[bool, ...]:
    """Whether a cache sees the question when it selects: true, false, or a list of both."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(item, bool) for item in values) or len(set(values)) < len(values):
        raise ConfigError(f"query_aware must be true, false or [true, false]; got {value!r}.")
    return tuple(values)


def _delta(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigError(f"delta is a loss of score that is held to be none, a number in [0, 1); got {value!r}.")
    return float(value)


def _policy(value: Any, budgets: tuple[BudgetValue, ...], index: int) -> PolicySpec:
    where = f"policies[{index}]"
    value = {"name": value} if isinstance(value, str) else value
    fields.check_keys(value, ("name", "options", "grid", "budgets", "matched"), required=("name",), where=where)
    name = fields.text(value["name"], where=f"{where}.name")
    if name == NO_CONTEXT:
        raise ConfigError(
            f"{where}: {NO_CONTEXT!r} is the full cache asked without its text. Write `floor: true` instead."
        )
    own = _budgets(value["budgets"], where=f"{where}.budgets") if "budgets" in value else budgets
    # A policy that takes no budget is asked for with `budgets: []` and runs once.
    chosen = (None,) if name == "full" or not own else own
    return PolicySpec(
        name=name,
        budgets=chosen,
        options=_plain(fields.mapping(value.get("options", {}), where=f"{where}.options"), where=f"{where}.options"),
        grid=_grid(value.get("grid", {}), where=f"{where}.grid"),
        matched=_matched(value.get("matched", []), name, where=f"{where}.matched"),
    )


def _grid(value: Any, *, where: str) -> dict[str, tuple[Any, ...]]:
    """Option values to cross: a list of them by option."""
    found = fields.mapping(value, where=where)
    for option, values in found.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{where}.{option} must be a list of the values to run, such as [8, 16]; got {values!r}. A "
                "single value belongs under `options`."
            )
        fields.distinct(values, where=f"{where}.{option}")
    return {option: tuple(values) for option, values in _plain(found, where=where).items()}


def _plain(values: dict[str, Any], *, where: str) -> dict[str, Any]:
    """Values that a record can hold: YAML also makes dates of what is written like one."""
    try:
        canonical_json(values)
    except ManifestError as error:
        raise ConfigError(f"{where} is {values!r}, which no record can hold. {error}") from error
    return values


def _matched(names: Any, policy: str, *, where: str) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"{where} must be a list of policies such as [random, sliding_window]; got {names!r}.")
    refused = [name for name in names if name in (policy, *REFERENCES)]
    if refused or (names and policy in REFERENCES):
        raise ConfigError(
            f"{where} asks for {refused[0] if refused else names[0]!r} at the rows of {policy!r}. Matched are other "
            "policies with a budget, to one that drops rows."
        )
    return tuple(dict.fromkeys(names))


def _budgets(values: Any, *, where: str) -> tuple[BudgetValue, ...]:
    if not isinstance(values, list):
        raise ConfigError(f'{where} must be a list such as [128, 0.25, "4MiB"]; got {values!r}.')
    for value in values:
        parse_budget(value)
    fields.distinct(values, where=where)
    return tuple(values)


def _with_baselines(
    policies: list[PolicySpec], budgets: tuple[BudgetValue, ...], *, include_random: bool, floor: bool
) -> tuple[PolicySpec, ...]:
    """Put the full cache first, with and without the text, and random rows at every budget that a policy is run at."""
    # A full cache with options (rows in few bits) is one of those that are measured.
    named = {policy.name for policy in policies if policy.name != "full" or not (policy.options or policy.grid)}
    used = dict.fromkeys([b for p in policies for b in p.budgets if b is not None] + list(budgets))
    baselines = [] if "full" in named else [PolicySpec(name="full", budgets=(None,))]
    if floor:
        baselines.append(PolicySpec(name=NO_CONTEXT, budgets=(None,)))
    if include_random and "random" not in named and used:
        baselines.append(PolicySpec(name="random", budgets=tuple(used)))
    return tuple(baselines) + tuple(sorted(policies, key=lambda policy: policy.name != "full" or bool(policy.options)))
