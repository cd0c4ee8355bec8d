"""Layers that no policy acts on: transformers' own cache layers, held in versions.

Sliding and chunked layers beside full ones, and linear attention (`states.py`), stay what transformers makes of them. A
published layer object is never changed: a forward updates copies and publishes them together with the rows. Of rows the
copies are shallow, as updates make new tensors. A forward that dies leaves nothing to undo.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..compat import holds_states
from ..errors import StaleGenerationError
from .states import blank_states, cropped_states, mapped_states, state_tensors

__all__ = [
    "ForeignLayers",
    "blank_layers",
    "cropped_layers",
    "foreign_faults",
    "layer_tensors",
    "selected_layers",
    "settled_layers",
    "working_layers",
]

ForeignLayers = tuple[Any, ...]


def working_layers(layers: ForeignLayers, *, recording: bool) -> ForeignLayers:
    """Return copies for one forward; while past recording is on they keep what may be needed again."""
    copies = tuple(mapped_states(layer, Tensor.clone) if holds_states(layer) else copy.copy(layer) for layer in layers)
    for layer in copies:
        layer.record_past = recording
    return copies


def settled_layers(layers: ForeignLayers) -> ForeignLayers:
    """Return a forward's copies as they are published: without a graph."""
    return tuple(mapped_states(x, Tensor.detach) if holds_states(x) else _with_rows(x, Tensor.detach) for x in layers)


def blank_layers(layers: ForeignLayers) -> ForeignLayers:
    """Return layers that hold nothing."""
    return tuple(blank_states(layer) if holds_states(layer) else _blank_rows(layer) for layer in layers)


def cropped_layers(layers: ForeignLayers, removed: int, columns: int) -> ForeignLayers:
    """Return layers without their last `removed` columns, `columns` of which are left.

    Raises:
        StaleGenerationError: a layer has let go of what would be in reach again.
    """
    if not columns:
        return blank_layers(layers)
    return tuple(
        (cropped_states if holds_states(layer) else _cropped_rows)(layer, removed, columns) for layer in layers
    )


def selected_layers(layers: ForeignLayers, index_B: Tensor) -> ForeignLayers:
    """Return layers with their batch rows selected, repeated or reordered."""

    def select(part: Tensor) -> Tensor:
        return part.index_select(0, index_B.to(part.device))

    return tuple(mapped_states(x, select) if holds_states(x) else _with_rows(x, select) for x in layers)


def layer_tensors(layers: Iterable[Any]) -> list[Tensor]:
    """Return the keys, values and states that layers hold."""
    found = [state_tensors(layer) if holds_states(layer) else [layer.keys, layer.values] for layer in layers]
    return [part for parts in found for part in parts if isinstance(part, Tensor)]


def _with_rows(layer: Any, act: Callable[[Tensor], Tensor]) -> Any:
    twin = copy.copy(layer)
    twin.keys, twin.values = act(layer.keys), act(layer.values)
    return twin


def _blank_rows(layer: Any) -> Any:
    twin = copy.copy(layer)
    twin.keys = twin.values = None
    twin.is_initialized, twin.cumulative_length, twin.record_past = False, 0, False
    return twin


def _cropped_rows(layer: Any, removed: int, columns: int) -> Any:
    held, reach = int(layer.keys.shape[-2]), int(layer.sliding_window) - 1
    if held - removed < min(reach, columns):
        raise StaleGenerationError(
            f"crop(-{removed}) goes back to column {columns}, but a sliding layer of the model holds only its last "
            f"{held} rows. Call cache.activate_past_recording() before the forwards that may be taken back."
        )
    keep = slice(max(0, held - removed - reach), held - removed)
    twin = _with_rows(layer, lambda part: part[:, :, keep])
    twin.cumulative_length = columns
    return twin


def foreign_faults(
    layers: ForeignLayers, numbers: Sequence[int], state_layers: Container[int], columns: int
) -> list[str]:
    """Return every layer, by its number in the model, that was not fed as many columns as the cache."""
    faults = []
    for number, stock in zip(numbers, layers, strict=True):
        if number in state_layers:
            if any(stock.has_previous_state.values()) != bool(columns):
                faults.append(f"the states of layer {number} do not tell whether {columns} were fed")
        elif stock.get_seq_length() != columns:
            faults.append(f"sliding layer {number} was fed {stock.get_seq_length()} of {columns} columns")
    return faults
