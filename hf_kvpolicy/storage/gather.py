"""Materialising a selection: the same gather for keys, values and their map (scores travel with rows)."""

from __future__ import annotations

import torch
from torch import Tensor

from .dense import DenseRows

__all__ = ["gather_rows", "pack_rows"]


def gather_rows(rows_BSND: Tensor, index_BMK: Tensor, stored_heads: int) -> Tensor:
    """Gather rows per stored head, [B, S, K, D].

    Shapes: index has one map head (shared) or one per stored head. Where stored heads outnumber the source's heads
    (selection per query head), each source head serves a contiguous group and is never expanded.
    """
    batch, source_heads, _, dim = rows_BSND.shape
    kept = index_BMK.shape[2]
    index_BSK = index_BMK.expand(batch, stored_heads, kept)
    group = stored_heads // source_heads
    index = index_BSK.reshape(batch, source_heads, group * kept)
    gathered = torch.gather(rows_BSND, 2, index[..., None].expand(-1, -1, -1, dim))
    return gathered.reshape(batch, stored_heads, kept, dim)


def pack_rows(
    keys_BSND: Tensor, values_BSND: Tensor, index_BMK: Tensor, *, stored_heads: int, capacity: int, pinned: int = 0
) -> DenseRows:
    """Gather a selection into fresh buffers of `capacity` slots; the first `pinned` keys are kept pristine as well."""
    kept = index_BMK.shape[2]
    keys = gather_rows(keys_BSND, index_BMK, stored_heads)
    packed = DenseRows.allocate(keys, values_BSND.new_empty((*keys.shape[:3], values_BSND.shape[3])), capacity, pinned)
    packed.keys_BSCD[:, :, :kept] = keys
    packed.values_BSCD[:, :, :kept] = gather_rows(values_BSND, index_BMK, stored_heads)
    if packed.pinned_keys_BSPD is not None:
        packed.pinned_keys_BSPD[:, :, : min(pinned, kept)] = keys[:, :, :pinned]
    return packed
