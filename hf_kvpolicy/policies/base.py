"""What every policy file shares: reading common options into a `Composition`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from transformers import PreTrainedConfig, PreTrainedModel

from ..allocation import parse_budget
from ..cache import PolicyCache
from ..engine import Composition
from ..errors import ConfigError, ManifestError, did_you_mean
from ..representation import ORIGINAL_ROWS, RowRepresentation

__all__ = [
    "BudgetLike",
    "ModelOrConfig",
    "PolicyCache",
    "bounded_only",
    "check_ratio",
    "compose",
    "row_representation",
    "token_positions",
]

ModelOrConfig: TypeAlias = PreTrainedModel | PreTrainedConfig
BudgetLike: TypeAlias = int | float | str


def compose(
    policy: str,
    common: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    *,
    needs_budget: bool = True,
    **axes: Any,
) -> Composition:
    """Build a composition from what every bounded policy takes, a policy's own options, and its axes.

    Args:
        policy: the registered name.
        common: budget, unit, group, protect, on_append, chunked_prefill, variant, fallback, quantize, block_rows, as
        the constructor got them. own: the policy's other constructor options, for the manifest.
        needs_budget: whether budget=None is refused; else it means no limit.
        axes: what the options mean: schedule, evidence, window_rows, sinks, ...

    Raises:
        ConfigError, BudgetError, ManifestError: as `Composition`, `parse_budget` and `token_positions`.
    """
    shared = {**common, "protect": token_positions(common["protect"], policy)}
    options = {**shared, **(own or {})}
    given = shared.pop("budget")
    representation = row_representation(policy, shared.pop("quantize", None), shared.pop("block_rows", 32))
    budget = parse_budget(given) if needs_budget or given is not None else None
    return Composition(policy=policy, budget=budget, options=options, representation=representation, **shared, **axes)


def row_representation(policy: str, quantize: str | None, block_rows: int) -> RowRepresentation:
    """Return what a stored row is: original, or with older rows in few bits.

    Raises:
        ConfigError: no such precision, or a block without a row.
    """
    if isinstance(block_rows, bool) or not isinstance(block_rows, int) or block_rows < 1:
        raise ConfigError(f"{policy}: block_rows is a number of rows from 1 on; got {block_rows!r}. Give 32 or 64.")
    if quantize is None:
        return ORIGINAL_ROWS
    # Not imported where rows stay as they are.
    from ..representation.quantized import PRECISIONS, QuantizedRows

    if quantize not in PRECISIONS:
        hint = did_you_mean(str(quantize), list(PRECISIONS))
        raise ConfigError(f"{policy}: quantize={quantize!r} is unknown; allowed are {(None, *PRECISIONS)}.{hint}")
    name = f"quantized_rows_{quantize}"
    return QuantizedRows(
        name=name, replaces_rows=False, quantizes=True, bits=PRECISIONS[quantize], block_rows=block_rows
    )


def check_ratio(policy: str, name: str, value: float) -> None:
    """Reject a share outside [0, 1].

    Raises:
        ConfigError: the value is not a number between 0 and 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{policy}: {name} is a share between 0 and 1; got {value!r}.")


def bounded_only(on_append: str, policy: str) -> str:
    """Return `on_append` of a policy whose budget holds after every step.

    Raises:
        ManifestError: "append" would let a prompt segment exceed the budget.
    """
    if on_append == "append":
        raise ManifestError(
            f"{policy}: the budget holds after every step, but on_append='append' keeps a later prompt segment whole. "
            "Use on_append='recompress', or a policy that decides at the end of a prompt (snapkv)."
        )
    return on_append


def token_positions(protect: Iterable[int] | None, policy: str) -> tuple[int, ...]:
    """Return explicit protected token positions, ascending and without duplicates.

    Raises:
        ConfigError: an entry is not a non-negative whole number.
    """
    wanted: list[Any] = [] if protect is None else list(protect)
    for token in wanted:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigError(
                f"{policy}: protect must list token positions (0 is a row's first real token); got {token!r}. "
                "Give for example protect=range(0, 20) for a system prompt of 20 tokens."
            )
    return tuple(sorted(set(wanted)))
