"""Blocks of coded rows as named tensors, and back; what lies beside them is saved as rows are that are not coded.

Letters: B batch rows, S stored heads, N blocks, G rows of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..errors import IntegrityError
from ..storage import DenseRows, RaggedRows
from ..storage.coded import CodedRows, with_blocks
from ..storage.codes import CHANNEL_AXIS, CODE_BITS, ROW_AXIS, CodedTensor, code_bytes
from ..storage.owner_blocks import OwnerBlocks
from ..storage.ragged_coded import CodedRaggedRows, with_owner_blocks

__all__ = ["decode_blocks", "decode_owners", "encode_blocks", "encode_owners", "owner_facts"]

_PARTS = ("codes", "scales", "zeros")
Take = Callable[[str, torch.device], Tensor]
TakeIfAny = Callable[[str, torch.device], Tensor | None]


def encode_blocks(layer: int, rows: DenseRows) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the facts of a layer's blocks as plain JSON values, none where it has none, and their tensors by name."""
    if not isinstance(rows, CodedRows):
        return {}, {}
    tensors = _named(f"layer.{layer}", rows.key_blocks, rows.value_blocks)
    return {"layer": layer, "bits": rows.key_blocks.bits, "pinned": rows.pinned}, tensors


def decode_blocks(take: Take, facts: Mapping[str, Any], rows: DenseRows) -> CodedRows:
    """Return a layer's rows with its blocks between those that are pinned and the others.

    Raises:
        IntegrityError: facts and tensors do not belong together.
    """
    name, bits, dims = f"layer.{facts['layer']}", facts["bits"], (rows.keys_BSCD.shape[3], rows.values_BSCD.shape[3])
    blocks = _taken(take, name, bits, dims, rows.keys_BSCD.dtype, rows.device)
    if blocks[0].codes_BSNGX.shape[:2] != rows.keys_BSCD.shape[:2]:
        _refuse(name)
    return with_blocks(rows, blocks, facts["pinned"])


def owner_facts(rows: RaggedRows) -> dict[str, Any]:
    """Return the facts of the blocks of ragged rows."""
    if not isinstance(rows, CodedRaggedRows):
        return {}
    blocks = rows.blocks
    return {
        "blocks": list(blocks.counts),
        "coded": list(blocks.slots),
        "block_rows": blocks.block_rows,
        "bits": blocks.keys.bits,
    }


def encode_owners(name: str, rows: RaggedRows, used: Sequence[int]) -> tuple[RaggedRows, list[int], dict[str, Tensor]]:
    """Return ragged rows without those in blocks, how many slots of each owner are left, and the blocks' tensors."""
    if not isinstance(rows, CodedRaggedRows):
        return rows, list(used), {}
    left = [slots - coded for slots, coded in zip(used, rows.coded, strict=True)]
    tensors, places = _named(name, rows.blocks.keys, rows.blocks.values), rows.blocks.places_C
    return rows.plain(), left, tensors | ({} if places is None else {f"{name}.places": places})


def decode_owners(
    take: Take, take_if_any: TakeIfAny, name: str, facts: Mapping[str, Any], rows: RaggedRows
) -> CodedRaggedRows:
    """Return ragged rows with each owner's blocks before them.

    Raises:
        IntegrityError: facts and tensors do not belong together.
    """
    dims = (rows.keys_ND.shape[1], rows.values_ND.shape[1])
    keys, values = _taken(take, name, facts["bits"], dims, rows.keys_ND.dtype, rows.device)
    counts, slots, places = tuple(facts["blocks"]), tuple(facts["coded"]), take_if_any(f"{name}.places", rows.device)
    owned = len(counts) == len(slots) == len(rows.starts) and min(*counts, *slots) >= 0
    if not owned or keys.codes_BSNGX.shape[2:4] != (sum(counts), facts["block_rows"]):
        _refuse(name)
    blocks = OwnerBlocks(keys=keys, values=values, counts=counts, slots=slots, places_C=places)
    placed = blocks.all_places if places is None else places.numel()
    if placed != sum(slots) or (places is not None and places.dtype != torch.int32) or blocks.faults():
        _refuse(name)
    return with_owner_blocks(rows, blocks)


def _named(name: str, keys: CodedTensor, values: CodedTensor) -> dict[str, Tensor]:
    return {
        f"{name}.{kind}.{part}": tensor
        for kind, blocks in (("key_blocks", keys), ("value_blocks", values))
        for part, tensor in zip(_PARTS, blocks.tensors(), strict=True)
    }


def _taken(
    take: Take, name: str, bits: int, dims: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> tuple[CodedTensor, CodedTensor]:
    found = []
    for kind, dim, axis in (("key_blocks", dims[0], ROW_AXIS), ("value_blocks", dims[1], CHANNEL_AXIS)):
        codes, scales, zeros = (take(f"{name}.{kind}.{part}", device) for part in _PARTS)
        found.append(
            CodedTensor(
                codes_BSNGX=codes,
                scales=scales,
                zeros=zeros,
                bits=bits,
                dim=dim,
                axis=axis,
                has_voids=bool((scales < 0).any()),
            )
        )
    keys, values = found
    if bits not in CODE_BITS or not all(_is_sound(blocks, dtype) for blocks in found):
        _refuse(name)
    if keys.codes_BSNGX.shape[:4] != values.codes_BSNGX.shape[:4]:
        _refuse(name)
    return keys, values


def _refuse(name: str) -> NoReturn:
    raise IntegrityError(f"The saved blocks of {name} contradict one another, or the rows beside them.")


def _is_sound(blocks: CodedTensor, dtype: torch.dtype) -> bool:
    codes = blocks.codes_BSNGX
    shape = (*codes.shape[:3], *((1, blocks.dim) if blocks.axis == ROW_AXIS else (codes.shape[3:4].numel(), 1)))
    return (
        codes.dtype == torch.int8
        and codes.dim() == 5
        and codes.shape[4] == code_bytes(blocks.dim, blocks.bits)
        and blocks.scales.shape == blocks.zeros.shape == shape
        and blocks.scales.dtype == blocks.zeros.dtype == dtype
    )
