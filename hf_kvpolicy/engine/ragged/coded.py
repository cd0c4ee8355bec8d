"""Coding ragged rows in few bits: each owner's older rows, those of its own and of the tail alike.

Owners are of unequal length, so that another one has a full residual at every step. All are coded together, when a
selection is published, and then each time the tail has grown by a block.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ...representation.quantized import QuantizedRows
from ...storage import RaggedLayer
from ...storage.coded import due_blocks
from ...storage.ragged_coded import CodedRaggedRows, code_owners
from ..snapshot import Snapshot

__all__ = ["ragged_coding_faults", "ragged_payload_bytes", "with_owners_coded"]


def with_owners_coded(rule: QuantizedRows, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot with what is due coded in all layers; itself where nothing is."""
    # Between codings a residual may grow by the block that the tail grows by.
    least = 2 if not snapshot.tail_width else 3
    residual = max(
        length + snapshot.tail_width - coded
        for layer in snapshot.ragged
        for length, coded in zip(layer.map.lengths, _coded(layer), strict=True)
    )
    if due_blocks(residual, rule.block_rows) < least - 1:
        return snapshot
    layers = []
    for layer in snapshot.ragged:
        used = [length + snapshot.tail_width for length in layer.map.lengths]
        live = _live(snapshot, layer)
        rows = code_owners(layer.rows, used, live, bits=rule.bits, block_rows=rule.block_rows)
        layers.append(RaggedLayer(rows=rows, map=layer.map))
    return replace(snapshot, ragged=tuple(layers), evicted_at_column=snapshot.frontier.columns)


def ragged_payload_bytes(snapshot: Snapshot) -> int:
    """Return the bytes of live rows, with all it takes to read them."""
    total = 0
    for layer in snapshot.ragged:
        live, rows = _live(snapshot, layer), layer.rows
        plain_bytes = sum(int(own.sum()) for own in live) * rows.row_bytes
        total += rows.payload_bytes(live) if isinstance(rows, CodedRaggedRows) else plain_bytes
    return total


def ragged_coding_faults(snapshot: Snapshot, rule: QuantizedRows | None) -> list[str]:
    """Return where stores are not coded as the policy says."""
    faults = []
    for index, layer in enumerate(snapshot.ragged):
        rows = layer.rows
        if not isinstance(rows, CodedRaggedRows):
            continue
        found = (rows.key_blocks.bits, rows.value_blocks.bits, rows.block_rows)
        if rule is None or found != (rule.bits, rule.bits, rule.block_rows):
            faults.append(
                f"layer {index} has rows coded in {found[0]} bits and blocks of {found[2]} rows, which is not what its "
                "policy does"
            )
        if sum(rows.blocks) != rows.key_blocks.blocks or rows.key_blocks.blocks != rows.value_blocks.blocks:
            faults.append(f"layer {index} has other blocks than its owners are said to have")
    return faults


def _coded(layer: RaggedLayer) -> tuple[int, ...]:
    return layer.rows.coded if isinstance(layer.rows, CodedRaggedRows) else (0,) * len(layer.map.lengths)


def _live(snapshot: Snapshot, layer: RaggedLayer) -> list[Tensor]:
    """Return which of each owner's slots in use hold a row: all of its own, and those of the tail that do."""
    device, tail = layer.map.device, snapshot.tail
    found = []
    for owner, length in enumerate(layer.map.lengths):
        own = torch.ones(length, dtype=torch.bool, device=device)
        found.append(own if tail is None else torch.cat([own, tail.live_BMW[owner // layer.map.heads, 0]]))
    return found
