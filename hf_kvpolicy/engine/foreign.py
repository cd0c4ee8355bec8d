"""Layers that no policy acts on: transformers' own cache layers, held in versions.

In a model of full and sliding layers the sliding ones stay what transformers makes of them. A published layer object is
never changed: a forward updates shallow copies, whose updates make new tensors, and publishes the copies together with
the rows. A forward that dies leaves nothing to undo.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import StaleGenerationError

__all__ = [
    "ForeignLayers",
    "blank_layers",
    "cropped_layers",
    "layer_tensors",
    "selected_layers",
    "settled_layers",
    "working_layers",
]

ForeignLayers = tuple[Any, ...]


def working_layers(layers: ForeignLayers, *, recording: bool) -> ForeignLayers:
    """Return copies for one forward; while past recording is on they keep rows that may be needed again."""
    copies = tuple(copy.copy(layer) for layer in layers)
    for layer in copies:
        layer.record_past = recording
    return copies


def settled_layers(layers: ForeignLayers) -> ForeignLayers:
    """Return a forward's copies as they are published: without a graph."""
    for layer in layers:
        layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
    return layers


def blank_layers(layers: ForeignLayers) -> ForeignLayers:
    """Return layers that hold nothing."""
    copies = tuple(copy.copy(layer) for layer in layers)
    for layer in copies:
        layer.keys = layer.values = None
        layer.is_initialized, layer.cumulative_length, layer.record_past = False, 0, False
    return copies


def cropped_layers(layers: ForeignLayers, removed: int, columns: int) -> ForeignLayers:
    """Return layers without their last `removed` columns, `columns` of which are left.

    Raises:
        StaleGenerationError: a sliding layer has let go of rows that are in its window again.
    """
    if not columns:
        return blank_layers(layers)
    copies = tuple(copy.copy(layer) for layer in layers)
    for layer in copies:
        held = int(layer.keys.shape[-2])
        if held - removed < min(int(layer.sliding_window) - 1, columns):
            raise StaleGenerationError(
                f"crop(-{removed}) goes back to column {columns}, but a sliding layer of the model holds only its last "
                f"{held} rows. Call cache.activate_past_recording() before the forwards that may be taken back."
            )
        keep = slice(max(0, held - removed - (int(layer.sliding_window) - 1)), held - removed)
        layer.keys, layer.values = layer.keys[:, :, keep], layer.values[:, :, keep]
        layer.cumulative_length = columns
    return copies


def selected_layers(layers: ForeignLayers, index_B: Tensor) -> ForeignLayers:
    """Return layers with their batch rows selected, repeated or reordered."""
    copies = tuple(copy.copy(layer) for layer in layers)
    for layer in copies:
        index = index_B.to(layer.keys.device)
        layer.keys, layer.values = layer.keys.index_select(0, index), layer.values.index_select(0, index)
    return copies


def layer_tensors(layers: Iterable[Any]) -> list[Tensor]:
    """Return the keys and values that layers hold."""
    return [part for layer in layers for part in (layer.keys, layer.values) if isinstance(part, torch.Tensor)]
