"""Dense rows as named tensors, and back, and what is apart of ragged ones. Slots in use are saved, not their room."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..engine.snapshot import Snapshot
from ..errors import IntegrityError
from ..storage import DenseRows, RaggedRows

__all__ = ["blocks_of_owners", "decode_rows", "encode_rows", "joined_owners", "split_owners"]

Take = Callable[[str, torch.device], Tensor]
TakeIfAny = Callable[[str, torch.device], Tensor | None]


def encode_rows(snapshot: Snapshot) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the facts of a snapshot's dense rows as plain JSON values, and their tensors by name."""
    tensors: dict[str, Tensor] = {}
    coded = []
    for layer, rows in enumerate(snapshot.rows):
        held = snapshot.width - rows.coded_slots
        tensors[f"layer.{layer}.keys"] = rows.keys_BSCD[:, :, :held]
        tensors[f"layer.{layer}.values"] = rows.values_BSCD[:, :, :held]
        if rows.pinned_keys_BSPD is not None:
            tensors[f"layer.{layer}.pinned_keys"] = rows.pinned_keys_BSPD
        if rows.coded_slots:
            from .coded import encode_blocks  # not imported where rows stay as they are

            own, parts = encode_blocks(layer, rows)
            coded.append(own)
            tensors |= parts
    facts: dict[str, Any] = {"capacities": [rows.keys_BSCD.shape[2] for rows in snapshot.rows]}
    return facts | ({"coded": coded} if coded else {}), tensors


def decode_rows(
    take: Take,
    take_if_any: TakeIfAny,
    facts: Mapping[str, Any],
    devices: Sequence[torch.device],
) -> tuple[DenseRows, ...]:
    """Rebuild dense rows on the devices of their layers.

    Raises:
        IntegrityError: facts and tensors do not belong together.
    """
    found = []
    for layer, capacity in enumerate(facts["capacities"]):
        device, name = devices[layer], f"layer.{layer}"
        keys, values = take(f"{name}.keys", device), take(f"{name}.values", device)
        if capacity < keys.shape[2] or keys.shape[:3] != values.shape[:3]:
            raise IntegrityError(
                f"Layer {layer} was saved with keys, values and a capacity that contradict one another."
            )
        pinned = take_if_any(f"{name}.pinned_keys", device)
        rows = DenseRows.allocate(keys, values, capacity, 0 if pinned is None else pinned.shape[2])
        rows.write(0, keys, values)
        if rows.pinned_keys_BSPD is not None and pinned is not None:
            rows.pinned_keys_BSPD.copy_(pinned)
        found.append(rows)
    for fact in facts.get("coded", ()):
        from .coded import decode_blocks

        found[fact["layer"]] = decode_blocks(take, fact, found[fact["layer"]])
    return tuple(found)


def blocks_of_owners(rows: RaggedRows) -> dict[str, Any]:
    """Return the facts of ragged rows that are coded in few bits; none where none are."""
    if not rows.coded_slots:
        return {}
    from .coded import owner_facts

    return owner_facts(rows)


def split_owners(name: str, rows: RaggedRows, used: Sequence[int]) -> tuple[RaggedRows, list[int], dict[str, Tensor]]:
    """Return ragged rows without those in blocks, how many slots of each owner are left, and the blocks' tensors."""
    if not rows.coded_slots:
        return rows, list(used), {}
    from .coded import encode_owners

    return encode_owners(name, rows, used)


def joined_owners(
    take: Take, take_if_any: TakeIfAny, name: str, facts: Mapping[str, Any], rows: RaggedRows
) -> RaggedRows:
    """Return ragged rows with the blocks that their facts name; themselves where they name none.

    Raises:
        IntegrityError: facts and tensors do not belong together.
    """
    if "blocks" not in facts:
        return rows
    from .coded import decode_owners

    return decode_owners(take, take_if_any, name, facts, rows)
