"""Coding ragged rows in few bits: each owner's older rows, those of its own and of the tail alike.

Owners are of unequal length, so that another one has a full residual at every step. Those of a batch row are coded
together: when a segment is published, and then each time one of them has three blocks of rows that are not coded.

Letters: L layers, O owners of one layer (b * S + s).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

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
    if snapshot.home is not None:
        # What is away was published before, and nothing came since.
        return snapshot
    snapshot = _without_dead(snapshot)
    due_LO = _due(rule, snapshot)
    if not any(chain(*due_LO)):
        return snapshot
    snapshot, layers = snapshot.packed(), []
    for layer, due in zip(snapshot.ragged, due_LO, strict=True):
        used = [length + snapshot.tail_width for length in layer.map.lengths]
        live = _live(snapshot, layer)
        rows = code_owners(layer.rows, used, live, due, bits=rule.bits, block_rows=rule.block_rows)
        layers.append(RaggedLayer(rows=rows, map=layer.map))
    return replace(snapshot, ragged=tuple(layers), evicted_at_column=snapshot.frontier.columns)


def _without_dead(snapshot: Snapshot) -> Snapshot:
    """Return a snapshot in which no owner's dead slot lies in a block: the next row is written into it."""
    if not any(isinstance(layer.rows, CodedRaggedRows) and layer.map.is_open for layer in snapshot.ragged):
        return snapshot
    # Asked of the device once.
    spare = torch.cat([layer.map.next_slots_O for layer in snapshot.ragged]).tolist()
    coded = chain(*map(_coded, snapshot.ragged))
    dead = [slot if slot < slots else None for slot, slots in zip(spare, coded, strict=True)]
    if all(slot is None for slot in dead):
        return snapshot
    layers, owners = [], len(snapshot.ragged[0].map.lengths)
    for index, layer in enumerate(snapshot.ragged):
        own = dead[index * owners : (index + 1) * owners]
        rows = layer.rows.without(own) if isinstance(layer.rows, CodedRaggedRows) else layer.rows
        # Maps are windows on tensors of all layers: all of them are made anew, or none.
        moves_O = torch.tensor([slot is not None for slot in own], device=layer.map.device)
        layers.append(RaggedLayer(rows=rows, map=layer.map.with_spare_behind(moves_O)))
    return replace(snapshot, ragged=tuple(layers))


def _due(rule: QuantizedRows, snapshot: Snapshot) -> list[list[int]]:
    """Return how many blocks each owner's residual gives off, [L][O]: as due where one of its batch row's is full."""
    residual_LO = [
        [length + snapshot.tail_width - coded for length, coded in zip(layer.map.lengths, _coded(layer), strict=True)]
        for layer in snapshot.ragged
    ]
    tokens, heads, is_full = snapshot.frontier.tokens, snapshot.ragged[0].map.heads, []
    for row, (now, ended) in enumerate(zip(tokens, snapshot.segment_tokens or tokens, strict=True)):
        # Behind a segment a residual may grow by a block, so that not every step codes somebody's rows.
        most_blocks = 2 if now == ended else 3
        own = [rows for residual in residual_LO for rows in residual[row * heads : (row + 1) * heads]]
        is_full.append(max(own) >= most_blocks * rule.block_rows)
    return [
        [due_blocks(rows, rule.block_rows) if is_full[owner // heads] else 0 for owner, rows in enumerate(residual)]
        for residual in residual_LO
    ]


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
        if not isinstance(layer.rows, CodedRaggedRows):
            continue
        blocks = layer.rows.blocks
        found = (blocks.keys.bits, blocks.values.bits, blocks.block_rows)
        if rule is None or found != (rule.bits, rule.bits, rule.block_rows):
            faults.append(
                f"layer {index} has rows coded in {found[0]} bits and blocks of {found[2]} rows, which is not what its "
                "policy does"
            )
        faults += [f"layer {index}, owner {owner} {fault}" for owner, fault in blocks.faults()]
        spare = layer.map.spare_O
        if spare is not None and any(slot < coded for slot, coded in zip(spare.tolist(), blocks.slots, strict=True)):
            faults.append(f"layer {index} would write an owner's next row into a block")
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
