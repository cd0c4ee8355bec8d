"""Weights that accelerate's hooks keep elsewhere and fetch for every forward: what they are, and where they compute.

Between forwards such a weight is a tensor of the meta device, which has neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .errors import ConfigError

__all__ = ["computing_device", "named_weights"]


def computing_device(module: torch.nn.Module) -> torch.device:
    """Return where a module computes: where its first weight is, or where hooks bring it."""
    for part in module.modules():
        weight = next(part.parameters(recurse=False), None)
        if weight is None:
            continue
        devices = [getattr(hook, "execution_device", None) for hook in _hooks(part)] if weight.is_meta else []
        return next((torch.device(device) for device in devices if device is not None), weight.device)
    return torch.device("cpu")


def named_weights(module: torch.nn.Module, *, every: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Yield each so-many-th of a module's weights, sorted by name; one that hooks keep elsewhere is read from there.

    Raises:
        ConfigError: a weight is nowhere.
    """
    for name, weight in sorted(module.named_parameters())[::every]:
        yield name, weight if not weight.is_meta else _fetched(module, name)


def _fetched(module: torch.nn.Module, name: str) -> Tensor:
    path, _, own = name.rpartition(".")
    for hook in _hooks(module.get_submodule(path)):
        held = getattr(hook, "weights_map", None)
        if held is not None:
            found: Tensor = held[own]
            return found
    raise ConfigError(
        f"The weight {name!r} is on the meta device, and no hook of accelerate fetches it, so it cannot be told which "
        "checkpoint this is. Load the model's weights first."
    )


def _hooks(module: torch.nn.Module) -> tuple[Any, ...]:
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))
