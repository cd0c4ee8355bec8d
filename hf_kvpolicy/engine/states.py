"""States of linear-attention layers, in versions.

Such a layer holds, of each of its convolutions, the last inputs, and of each recurrence one state: what every token so
far has made of it. Models write both in place, so a forward works on copies.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import StaleGenerationError

__all__ = ["blank_states", "cropped_states", "mapped_states", "state_tensors"]


def mapped_states(layer: Any, act: Callable[[Tensor], Tensor]) -> Any:
    """Return a layer with its own tables, whose states are what `act` makes of them."""
    twin = copy.copy(layer)
    for name, value in vars(layer).items():
        if isinstance(value, dict):
            made = {key: act(part) if isinstance(part, Tensor) else part for key, part in value.items()}
            setattr(twin, name, made)
    return twin


def blank_states(layer: Any) -> Any:
    """Return a layer that holds nothing."""
    return type(layer)(number_of_states=layer.number_of_states)


def cropped_states(layer: Any, removed: int, columns: int) -> Any:
    """Return a layer without its last `removed` columns, `columns` of which are left.

    Raises:
        StaleGenerationError: a recurrence took them in, or a convolution has let go of what came before them.
    """
    if removed and any(layer.is_recurrent_states_initialized.values()):
        raise StaleGenerationError(
            f"crop(-{removed}) goes back to column {columns}, but the model's linear attention keeps one recurrent "
            "state of all tokens, from which none can be taken back. Fork the cache before tokens that may be "
            "rejected, and do not use assisted decoding or prompt lookup with this model."
        )
    found = mapped_states(layer, lambda part: part)
    for number, part in layer.conv_states.items():
        if part is not None:
            found.conv_states[number] = _last_inputs(part, int(layer.conv_kernel_size[number]), removed, columns)
    return found


def state_tensors(layer: Any) -> list[Tensor]:
    """Return the states of a layer."""
    return [part for part in (*layer.conv_states.values(), *layer.recurrent_states.values()) if part is not None]


def _last_inputs(part: Tensor, kernel: int, removed: int, columns: int) -> Tensor:
    """Return the last `kernel` inputs of a convolution before those that are removed; zeros stand before the first."""
    held = min(part.shape[-1], columns + removed)
    if held - removed < min(kernel, columns):
        raise StaleGenerationError(
            f"crop(-{removed}) goes back to column {columns}, but a convolution of the model holds only its last "
            f"{held} inputs. Call cache.activate_past_recording() before the forwards that may be taken back."
        )
    if not removed and part.shape[-1] == kernel:
        return part
    kept = part[..., max(0, part.shape[-1] - removed - kernel) : part.shape[-1] - removed]
    return torch.nn.functional.pad(kept, (kernel - kept.shape[-1], 0)).clone()
