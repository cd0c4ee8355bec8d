"""What every policy file shares: reading common options into a `Composition`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from transformers import PreTrainedConfig, PreTrainedModel

from ..allocation import parse_budget
from ..cache import PolicyCache
from ..engine import Composition
from ..errors import ConfigError, did_you_mean
from ..representation import ORIGINAL_ROWS, RowRepresentation
from .merging import MergeLayers, merged_options, merged_rows
from .options import bounded_only, check_ratio, refuse_quantized, refuse_unused, token_positions

__all__ = [
    "BudgetLike",
    "MergeLayers",
    "ModelOrConfig",
    "PolicyCache",
    "block_rows_of",
    "bounded_only",
    "check_ratio",
    "compose",
    "refuse_quantized",
    "row_representation",
    "token_positions",
]

ModelOrConfig: TypeAlias = PreTrainedModel | PreTrainedConfig
BudgetLike: TypeAlias = int | float | str
_BLOCK_ROWS = 32


def compose(
    policy: str,
    common: Mapping[str, Any],
    own: Mapping[str, Any] | None = None,
    *,
    model: ModelOrConfig | None = None,
    needs_budget: bool = True,
    **axes: Any,
) -> Composition:
    """Build a composition from what every bounded policy takes, a policy's own options, and its axes.

    Args:
        policy: the registered name.
        common: budget, unit, group, protect, on_append, chunked_prefill, variant, fallback, quantize, block_rows,
            merge_layers, as the constructor got them.
        own: the policy's other constructor options, for the manifest.
        model: whose layers may be merged.
        needs_budget: whether budget=None is refused; else it means no limit.
        axes: what the options mean: schedule, evidence, window_rows, sinks, ...

    Raises:
        ConfigError, BudgetError, ManifestError: as `Composition`, `parse_budget`, `token_positions`, `merged_rows` and
            `refuse_quantized`.
    """
    shared = {**common, "protect": token_positions(common["protect"], policy)}
    options = {**shared, **(own or {})}
    given = shared.pop("budget")
    quantize, block_rows, merge_layers = (shared.pop(name, None) for name in ("quantize", "block_rows", "merge_layers"))
    representation = row_representation(policy, quantize, block_rows)
    # What is recorded has one spelling for all that mean the same.
    if quantize is not None:
        options["block_rows"] = block_rows_of(policy, quantize, block_rows)
    if merge_layers is not None:
        refuse_quantized(policy, quantize)
        assert model is not None, "a policy that takes merge_layers hands its model on"
        representation = merged_rows(policy, merge_layers, model)
        options["merge_layers"] = merged_options(representation)
    budget = parse_budget(given) if needs_budget or given is not None else None
    return Composition(policy=policy, budget=budget, options=options, representation=representation, **shared, **axes)


def block_rows_of(policy: str, quantize: str | None, block_rows: int | None) -> int | None:
    """Return how many rows are quantized together: 32 where it is not said, None where none are.

    Raises:
        ConfigError: it is said although no row is quantized, or is no number of rows.
    """
    refuse_unused(policy, {"quantize": quantize, "block_rows": block_rows})
    if quantize is None:
        return None
    found = _BLOCK_ROWS if block_rows is None else block_rows
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise ConfigError(f"{policy}: block_rows is a number of rows from 1 on; got {block_rows!r}. Give 32 or 64.")
    return found


def row_representation(policy: str, quantize: str | None, block_rows: int | None) -> RowRepresentation:
    """Return what a stored row is: original, or with older rows in few bits.

    Raises:
        ConfigError: no such precision, or as `block_rows_of`.
    """
    rows = block_rows_of(policy, quantize, block_rows)
    if quantize is None or rows is None:
        return ORIGINAL_ROWS
    # Not imported where rows stay as they are.
    from ..representation.quantized import PRECISIONS, QuantizedRows

    if quantize not in PRECISIONS:
        hint = did_you_mean(str(quantize), list(PRECISIONS))
        raise ConfigError(f"{policy}: quantize={quantize!r} is unknown; allowed are {(None, *PRECISIONS)}.{hint}")
    name = f"quantized_rows_{quantize}"
    return QuantizedRows(name=name, replaces_rows=False, quantizes=True, bits=PRECISIONS[quantize], block_rows=rows)
