"""Cache layers of transformers as named tensors, and back: rows of sliding layers, states of linear attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..compat import holds_states
from ..errors import IntegrityError

__all__ = ["decode_foreign", "encode_foreign"]

TakeIfAny = Callable[[str, torch.device], Tensor | None]
_STATES = ("conv", "recurrent")
# What a layer of states tells beside them, one entry a state.
_FACTS = ("conv_kernel_size", "has_previous_state")


def encode_foreign(layer: Any, name: str, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Add a layer's tensors by name; return its facts as plain JSON values."""
    if holds_states(layer):
        parts = {f"{name}.{kind}.{i}": part for kind in _STATES for i, part in _table(layer, f"{kind}_states").items()}
        tensors.update({key: part for key, part in parts.items() if part is not None})
        return {told: list(_table(layer, told).values()) for told in _FACTS}
    if layer.is_initialized:
        tensors[f"{name}.keys"], tensors[f"{name}.values"] = layer.keys, layer.values
    return {"columns": int(layer.get_seq_length()), "window": int(layer.sliding_window)}


def decode_foreign(fact: Mapping[str, Any], layer: Any, name: str, take: TakeIfAny, device: torch.device) -> Any:
    """Fill an empty layer of the model with what was saved of it.

    Raises:
        IntegrityError: the saved layer is of another kind or size.
    """
    if holds_states(layer):
        return _with_states(fact, layer, name, take, device)
    if int(layer.sliding_window) != fact["window"]:
        raise IntegrityError(
            f"The saved cache has a sliding layer of {fact['window']} tokens; the model's has {layer.sliding_window}."
        )
    keys, values = (take(f"{name}.{part}", device) for part in ("keys", "values"))
    if keys is not None and values is not None:
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values, layer.cumulative_length = keys, values, fact["columns"]
    return layer


def _table(layer: Any, name: str) -> dict[int, Any]:
    found: dict[int, Any] = getattr(layer, name)
    return found


def _with_states(fact: Mapping[str, Any], layer: Any, name: str, take: TakeIfAny, device: torch.device) -> Any:
    for told in _FACTS:
        if len(fact[told]) != layer.number_of_states:
            raise IntegrityError(
                f"The saved cache has {len(fact[told])} states in a layer of linear attention; the model's has "
                f"{layer.number_of_states}."
            )
        _table(layer, told).update(enumerate(fact[told]))
    for kind in _STATES:
        for i in range(layer.number_of_states):
            part = take(f"{name}.{kind}.{i}", device)
            _table(layer, f"{kind}_states")[i] = part
            _table(layer, f"is_{kind}_states_initialized")[i] = part is not None
            if part is not None:
                layer.device = part.device
                layer.dtype = part.dtype if kind == "conv" else layer.dtype
    return layer
