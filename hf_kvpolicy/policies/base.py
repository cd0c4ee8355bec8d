"""What every policy file shares: reading common options into a `Composition`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from transformers import PreTrainedConfig, PreTrainedModel

from ..cache import PolicyCache
from ..errors import ConfigError

__all__ = ["BudgetLike", "ModelOrConfig", "PolicyCache", "token_positions"]

ModelOrConfig: TypeAlias = PreTrainedModel | PreTrainedConfig
BudgetLike: TypeAlias = int | float | str


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
