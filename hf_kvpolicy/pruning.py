"""Removing tokens between decoder layers: a hook on each layer, which asks the forward in flight what it keeps.

Nothing of the model's own loop is replaced. The hook is a function without state; in a forward of any other cache, or
of none, it does nothing.

Letters: B batch rows, T tokens of a forward, W tokens the layer computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from .frame import active_cache
from .graphs import outside_graphs

__all__ = ["prune_between", "stop_pruning"]


def prune_between(layers: Sequence[torch.nn.Module]) -> None:
    """Install the hook on every decoder layer but the first. Idempotent."""
    for layer in layers[1:]:
        if not any(_hooks(layer)):
            layer.register_forward_pre_hook(_before_layer, with_kwargs=True)


def stop_pruning(layers: Iterable[torch.nn.Module]) -> None:
    """Remove what `prune_between` installed. Idempotent."""
    for layer in layers:
        for key in list(_hooks(layer)):
            del layer._forward_pre_hooks[key]
            layer._forward_pre_hooks_with_kwargs.pop(key, None)


def _hooks(layer: torch.nn.Module) -> Iterable[int]:
    return (key for key, hook in layer._forward_pre_hooks.items() if hook is _before_layer)


@outside_graphs
def _before_layer(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Hand the layer only the tokens that its policy passes on, with their own rotations and positions."""
    cache = active_cache()
    step = None if cache is None else cache.in_flight
    kept = None if step is None else step.kept_tokens()
    if kept is None:
        return None
    given = dict(kwargs)
    for name in ("position_ids", "position_embeddings"):
        value = given.get(name)
        if isinstance(value, tuple):
            given[name] = tuple(_taken(part, kept.among_new_BW) for part in value)
        elif value is not None:
            given[name] = _taken(value, kept.among_new_BW)
    if kept.among_present_BW is None:
        return args, given
    if args:
        return (_taken(args[0], kept.among_present_BW), *args[1:]), given
    given["hidden_states"] = _taken(given["hidden_states"], kept.among_present_BW)
    return args, given


def _taken(part_BTX: Tensor, index_BW: Tensor) -> Tensor:
    """Return the tokens [B, W, ...] that an index names."""
    index = index_BW.to(part_BTX.device)
    shared = part_BTX.expand(index.shape[0], *part_BTX.shape[1:])
    tail = shared.shape[2:]
    return shared.gather(1, index.view(*index.shape, *(1 for _ in tail)).expand(*index.shape, *tail))
