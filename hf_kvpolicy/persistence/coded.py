"""Blocks of coded rows as named tensors, and back; what lies beside them is saved as rows are that are not coded.

Letters: B batch rows, S stored heads, N blocks, G rows of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..errors import IntegrityError
from ..storage import DenseRows
from ..storage.coded import CodedRows, with_blocks
from ..storage.codes import CHANNEL_AXIS, CODE_BITS, ROW_AXIS, CodedTensor, code_bytes

__all__ = ["decode_blocks", "encode_blocks"]

_PARTS = ("codes", "scales", "zeros")
Take = Callable[[str, torch.device], Tensor]


def encode_blocks(layer: int, rows: DenseRows) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the facts of a layer's blocks as plain JSON values, none where it has none, and their tensors by name."""
    if not isinstance(rows, CodedRows):
        return {}, {}
    tensors = {
        f"layer.{layer}.{name}.{part}": tensor
        for name, blocks in (("key_blocks", rows.key_blocks), ("value_blocks", rows.value_blocks))
        for part, tensor in zip(_PARTS, blocks.tensors(), strict=True)
    }
    return {"layer": layer, "bits": rows.key_blocks.bits, "pinned": rows.pinned}, tensors


def decode_blocks(take: Take, facts: Mapping[str, Any], rows: DenseRows) -> CodedRows:
    """Return a layer's rows with its blocks between those that are pinned and the others.

    Raises:
        IntegrityError: facts and tensors do not belong together.
    """
    layer, bits, pinned = facts["layer"], facts["bits"], facts["pinned"]
    keys, values = (
        CodedTensor(**dict(zip(("codes_BSNGX", "scales", "zeros"), parts, strict=True)), bits=bits, dim=dim, axis=axis)
        for parts, dim, axis in (
            (_taken(take, f"layer.{layer}.key_blocks", rows), rows.keys_BSCD.shape[3], ROW_AXIS),
            (_taken(take, f"layer.{layer}.value_blocks", rows), rows.values_BSCD.shape[3], CHANNEL_AXIS),
        )
    )
    sound = bits in CODE_BITS and keys.codes_BSNGX.shape[:4] == values.codes_BSNGX.shape[:4]
    if not sound or not all(_is_sound(blocks, rows) for blocks in (keys, values)):
        raise IntegrityError(f"The saved blocks of layer {layer} contradict one another.")
    return with_blocks(rows, (keys, values), pinned)


def _taken(take: Take, where: str, rows: DenseRows) -> list[Tensor]:
    return [take(f"{where}.{part}", rows.device) for part in _PARTS]


def _is_sound(blocks: CodedTensor, rows: DenseRows) -> bool:
    codes = blocks.codes_BSNGX
    shape = (*codes.shape[:3], *((1, blocks.dim) if blocks.axis == ROW_AXIS else (codes.shape[3], 1)))
    return (
        codes.dtype == torch.int8
        and codes.dim() == 5
        and codes.shape[:2] == rows.keys_BSCD.shape[:2]
        and codes.shape[4] == code_bytes(blocks.dim, blocks.bits)
        and blocks.scales.shape == blocks.zeros.shape == shape
        and blocks.scales.dtype == blocks.zeros.dtype == rows.keys_BSCD.dtype
    )
