"""The stores of layer pairs as named tensors, and back. Slots and log entries in use are saved; room is laid out again.

Of a prompt that is held the rows of both layers, which are not merged yet, are saved as they are.

Letters: B batch rows, H KV heads, W slots in use, D head dimension, E exceptions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..errors import IntegrityError
from ..storage import DenseRows
from ..storage.merged import MergedPair, MergedTensor

__all__ = ["decode_pair", "encode_pair"]

_PARTS = ("shared", "magnitudes", "thresholds", "index", "rows")
Take = Callable[[str, torch.device], Tensor]


def encode_pair(pair: MergedPair, width: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a pair's facts as plain JSON values and its tensors by name."""
    tensors: dict[str, Tensor] = {}
    merged = min(width, pair.merged_slots)
    facts: dict[str, Any] = {"layers": list(pair.layers), "slots": pair.keys.capacity, "merged_slots": merged}
    for name, store in (("keys", pair.keys), ("values", pair.values)):
        used = store.exceptions
        parts = (
            store.shared_BHCD[:, :, :merged],
            store.magnitudes_2BHC[..., :merged],
            store.thresholds_BH,
            store.index_E[:used],
            store.rows_2ED[:, :used],
        )
        where = f"pair.{pair.layers[0]}.{name}"
        tensors |= {f"{where}.{part}": tensor for part, tensor in zip(_PARTS, parts, strict=True)}
        facts[f"{name}_entries"] = store.index_E.shape[0]
    facts["unmerged_slots"] = [rows.capacity for rows in pair.unmerged]
    for layer, rows in zip(pair.layers, pair.unmerged, strict=False):
        held = zip(("keys", "values"), rows.view(width - merged), strict=True)
        tensors |= {f"pair.{pair.layers[0]}.unmerged.{layer}.{name}": tensor for name, tensor in held}
    return facts, tensors


def decode_pair(take: Take, facts: Mapping[str, Any], layer_devices: Sequence[torch.device]) -> MergedPair:
    """Rebuild a pair on the device of its deeper layer.

    Raises:
        IntegrityError: facts and tensors do not belong together.
    """
    lower, deeper = facts["layers"]
    device = layer_devices[deeper]
    keys, values = (
        _decode(take, f"pair.{lower}.{name}", facts["slots"], facts[f"{name}_entries"], device)
        for name in ("keys", "values")
    )
    if keys.shared_BHCD.shape[:2] != values.shared_BHCD.shape[:2]:
        raise IntegrityError(f"Layers {lower} and {deeper} were saved with keys and values of unequal shape.")
    if facts["merged_slots"] > keys.capacity:
        raise IntegrityError(f"Layers {lower} and {deeper} were saved with more merged slots than they have.")
    unmerged = []
    for layer, slots in zip((lower, deeper), facts["unmerged_slots"], strict=False):
        held = [take(f"pair.{lower}.unmerged.{layer}.{name}", device) for name in ("keys", "values")]
        rows = DenseRows.allocate(held[0], held[1], slots)
        rows.write(0, *held)
        unmerged.append(rows)
    merged = facts["merged_slots"]
    return MergedPair(layers=(lower, deeper), keys=keys, values=values, merged_slots=merged, unmerged=tuple(unmerged))


def _decode(take: Take, where: str, slots: int, entries: int, device: torch.device) -> MergedTensor:
    shared, magnitudes, thresholds, index, rows = (take(f"{where}.{part}", device) for part in _PARTS)
    batch, heads, width, dim = shared.shape
    used = index.shape[0]
    sound = (
        slots >= width
        and entries >= used
        and magnitudes.shape == (2, batch, heads, width)
        and thresholds.shape == (batch, heads)
        and rows.shape == (2, used, dim)
        and (magnitudes.dtype, thresholds.dtype, index.dtype) == (torch.float32, torch.float32, torch.int32)
        and rows.dtype == shared.dtype
    )
    if not sound:
        raise IntegrityError(f"The saved tensors of {where!r} contradict one another.")
    store = MergedTensor.allocate(shared, slots)
    store.write(0, shared, magnitudes)
    index_E, rows_2ED = index.new_empty(entries), rows.new_empty((2, entries, dim))
    index_E[:used], rows_2ED[:, :used] = index, rows
    return replace(store, thresholds_BH=thresholds, index_E=index_E, rows_2ED=rows_2ED, exceptions=used)
