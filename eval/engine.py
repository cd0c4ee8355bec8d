"""Where the harness meets the cache engine: building caches by name and reading what they hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ..allocation.budget import parse_budget
from ..config import make_cache, policy_options, with_tokenizer
from ..errors import ConfigError, did_you_mean
from ..geometry import CacheGeometry
from ..policies.options import refuse_unused
from ..registry import available_policies
from .cells import Cell
from .sweep import REFERENCES

__all__ = [
    "CacheBuilder",
    "CacheUse",
    "EngineBuilder",
    "RowsOverTime",
    "budget_rows",
    "check_policies",
    "check_takes_budget",
    "full_kv_bytes",
    "measure",
]


class CacheBuilder(Protocol):
    """Builds a fresh cache for one example of a cell."""

    def __call__(self, cell: Cell) -> Any:
        """A cache that holds nothing yet."""
        ...


class EngineBuilder:
    """Builds caches with `hf_kvpolicy.make_cache` for one model; a policy that takes a tokenizer gets the model's."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model, self._tokenizer = model, tokenizer

    def __call__(self, cell: Cell) -> Any:
        """A fresh cache, attached to the model."""
        policy = "full" if cell.policy in REFERENCES else cell.policy
        return make_cache(policy, self._model, cell.budget, **with_tokenizer(policy, cell.options, self._tokenizer))


def check_policies(options_by_policy: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
    """Refuse unknown policy names, unknown options and those that say nothing, before a model is loaded.

    Raises:
        ConfigError: with the closest known name, or with what an option needs beside it.
    """
    known = available_policies()
    for policy, options in options_by_policy:
        if policy not in known:
            raise ConfigError(
                f"There is no policy {policy!r}; available are {', '.join(known)}.{did_you_mean(policy, known)}"
            )
        allowed = [name for name in policy_options(policy) if name != "budget"]
        for option in options:
            if option not in allowed:
                raise ConfigError(
                    f"Policy {policy!r} has no option {option!r}; it takes {', '.join(allowed)}."
                    f"{did_you_mean(option, allowed)}"
                )
        refuse_unused(policy, options, allowed)


def check_takes_budget(names: Iterable[str]) -> None:
    """Refuse policies that cannot be given as many rows as another one held.

    Raises:
        ConfigError: there is no such policy, or it takes no budget.
    """
    for policy in names:
        check_policies([(policy, {})])
        if "budget" not in policy_options(policy):
            raise ConfigError(f"Policy {policy!r} takes no budget, so it cannot be matched. Name another one.")


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """Rows and bytes of a cache at one moment; rows are per stored head of the layers that store any."""

    # Pairs of such a layer and head.
    owners: int
    rows_mean: float
    rows_min: int
    rows_max: int
    measured_bytes: int
    payload_bytes: int
    slack_bytes: int
    transient_peak_bytes: int
    # Rows that end-of-prefill policies appended after their last selection.
    tail_rows_mean: float
    # Whether rows stand for others and none is chosen from: then no row goes, and bytes say whether the policy acted.
    replaces_rows: bool
    # Whether rows are stored in few bits, and whether two layers share theirs.
    quantizes: bool
    merges_layers: bool
    statistics: Mapping[str, int]


def measure(cache: Any) -> CacheUse:
    """Read rows, bytes and counters from a cache of one batch row."""
    stored = {layer: cache.stored_rows(layer).flatten() for layer in cache.policy_layers}
    rows = [
        int(count) for layer, own in stored.items() if own.any() or not _reads_another(cache, layer) for count in own
    ]
    ledger, counted = cache.ledger(), cache.statistics
    names = ("forwards", "publications", "selections", "rows_dropped")
    return CacheUse(
        owners=len(rows),
        rows_mean=sum(rows) / len(rows),
        rows_min=min(rows),
        rows_max=max(rows),
        measured_bytes=int(ledger.measured_bytes),
        payload_bytes=int(ledger.payload_bytes),
        slack_bytes=int(ledger.slack_bytes),
        transient_peak_bytes=int(ledger.transient_peak_bytes),
        tail_rows_mean=int(ledger.tail_rows) / len(rows),
        replaces_rows=bool(cache.composition.representation.replaces_rows and cache.composition.budget is None),
        quantizes=bool(cache.composition.quantizes),
        merges_layers=bool(cache.composition.merges_layers),
        statistics={name: int(getattr(counted, name)) for name in names},
    )


def _reads_another(cache: Any, layer: int) -> bool:
    """Whether a layer without rows reads those of another layer."""
    if not cache.composition.representation.replaces_rows:
        return False
    return any(len(tokens) for tokens in cache.positions(layer))


class RowsOverTime:
    """Rows per layer and stored head, right after the prompt and after every token fed since.

    The cache knows their total without asking the device, so it may be read while a clock runs.
    """

    def __init__(self, cache: Any, after_prompt: CacheUse) -> None:
        """Args: the cache of one batch row, and what it held after the prompt."""
        self._cache, self._owners = cache, after_prompt.owners
        self._rows = [after_prompt.rows_mean]

    def token_fed(self) -> None:
        """Note what the cache holds now."""
        self._rows.append(self._cache.total_rows / self._owners)

    @property
    def last(self) -> float:
        """Rows after the last token."""
        return self._rows[-1]

    @property
    def mean(self) -> float:
        """Mean over the forwards."""
        return sum(self._rows) / len(self._rows)


def full_kv_bytes(model: Any, tokens: int) -> int:
    """K/V payload of `tokens` rows in every layer and KV head of a full cache, without any sliding window."""
    geometry = CacheGeometry.from_config(model.config)
    return geometry.num_layers * geometry.num_kv_heads * geometry.row_bytes(model.dtype.itemsize) * tokens


def budget_rows(cell: Cell, cache: Any, model: Any, prompt_tokens: int) -> int | None:
    """Rows per layer and stored head that the cell's budget allows for this prompt; None without a budget.

    Resolved as the engine resolves it: a ratio never goes below the rows that the policy protects, plus one.
    """
    if cell.budget is None:
        return None
    geometry = CacheGeometry.from_config(model.config)
    (rows,) = parse_budget(cell.budget).resolve_rows(
        prompt_tokens=[prompt_tokens],
        owners_per_row=geometry.num_layers * cache.composition.stored_heads(geometry),
        row_bytes=geometry.row_bytes(model.dtype.itemsize),
        minimum_rows=cache.composition.minimum_rows,
    )
    return rows
