"""What of a sweep cannot run whatever the prompts are: found from the model's config, before the first cell.

Budgets that a policy's protected rows fill, and lengths beyond the model's positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..config import make_cache
from ..errors import BudgetError, ConfigError, KVPolicyError
from .cells import Cell, cells_at, task_points
from .model_loading import check_path, source_of
from .sweep import REFERENCES, SweepConfig

__all__ = ["check_budgets", "check_lengths", "local_config", "positions_of"]

# Cells to name in one error.
_NAMED = 6


def local_config(name: str) -> Any | None:
    """The config of a model that lies in a folder; None for a hub name, or where it cannot be read.

    Raises:
        ConfigError: the name is a path, and no folder is there.
    """
    from transformers import AutoConfig

    check_path(name)
    try:
        folder = Path(source_of(name))
        return AutoConfig.from_pretrained(folder) if folder.is_dir() else None
    except (KVPolicyError, OSError, ValueError):
        return None


def positions_of(config: Any) -> int | None:
    """How many positions a model has; None where it does not say, or has no end."""
    found = getattr(config, "max_position_embeddings", None)
    return None if found is None else int(found)


def check_lengths(config: SweepConfig, model_config: Any) -> None:
    """Refuse lengths beyond the model's positions.

    Raises:
        ConfigError: a task asks for one.
    """
    limit = positions_of(model_config)
    for task in config.tasks:
        longest = max(task.lengths_tokens)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"{task.name} asks for a length of {longest} tokens, and the model has positions for {limit}. Ask for "
                "shorter lengths, or name another model."
            )


def check_budgets(config: SweepConfig, model_config: Any | None) -> None:
    """Refuse budgets that leave a policy no row to choose. Bytes are left out: their rows depend on the dtype.

    Args:
        config: the checked sweep.
        model_config: the model's config; None where it is not known, and only what holds for every model is checked.

    Raises:
        BudgetError: it names the cells.
    """
    refused: dict[str, BudgetError] = {}
    for cell in _budgeted(config):
        try:
            make_cache(cell.policy, model_config or _any_config(), cell.budget, **cell.options)
        except BudgetError as error:
            refused[cell.label] = error
        except Exception:
            pass  # of this model, or of an option: the cell fails by itself, and says so with its outcome
    if not refused:
        return
    label, reason = next(iter(refused.items()))
    others = list(refused)[1:]
    named = ", ".join(others[:_NAMED]) + (" and others" if len(others) > _NAMED else "")
    found = f"{label} cannot run: {reason}"
    if named:
        found += f" The same holds for {named}."
    if any(found.startswith("random @") for found in refused):
        found += " `random` is added by itself; name it with a smaller window, or write `include_random: false`."
    raise BudgetError(found)


def _budgeted(config: SweepConfig) -> Iterator[Cell]:
    """One cell a policy, set of options and budget in rows or as a share."""
    seen = set()
    for point in task_points(config):
        for cell in cells_at(config, point):
            is_asked = cell.policy not in REFERENCES and isinstance(cell.budget, int | float)
            if is_asked and cell.label not in seen:
                seen.add(cell.label)
                yield cell


def _any_config() -> Any:
    """A model that every policy can act on: what protects rows is the same for others."""
    from transformers import LlamaConfig

    return LlamaConfig(num_hidden_layers=32, num_attention_heads=8, num_key_value_heads=8, hidden_size=512)
