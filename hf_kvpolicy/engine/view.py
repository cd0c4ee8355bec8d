"""Reading a layer's published rows as selection must see them: with pristine keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..storage import DenseRows

__all__ = ["pristine_keys", "published_keys"]


def published_keys(rows: DenseRows, width: int) -> Tensor:
    """Return the keys of the first `width` slots with pinned rows unmoved, [B, S, width, D]."""
    keys = rows.keys_BSCD[:, :, :width]
    pinned = rows.pinned_keys_BSPD
    if pinned is None:
        return keys
    return torch.cat([pinned, keys[:, :, pinned.shape[2] :]], dim=2)


def pristine_keys(rows: DenseRows, attended_BSND: Tensor, width: int, new_BSTD: Tensor) -> Tensor:
    """Return the attended keys with pinned rows unmoved; the same tensor where nothing is pinned."""
    if rows.pinned_keys_BSPD is None:
        return attended_BSND
    return torch.cat([published_keys(rows, width), new_BSTD], dim=2)
