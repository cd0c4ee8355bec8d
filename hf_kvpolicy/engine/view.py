"""Reading a layer's published rows as selection must see them: with pristine keys."""

from __future__ import annotations

import torch
from torch import Tensor

from ..storage import DenseRows

__all__ = ["pristine_keys", "published_rows"]


def published_rows(rows: DenseRows, width: int) -> tuple[Tensor, Tensor]:
    """Return keys (of pinned rows the unmoved ones) and values of the first `width` slots, [B, S, width, D]."""
    keys, values = rows.view(width)
    return pristine_keys(rows, keys), values


def pristine_keys(rows: DenseRows, attended_BSND: Tensor) -> Tensor:
    """Return attended keys, published ones first, with pinned rows unmoved; the same tensor where nothing is pinned."""
    pinned = rows.pinned_keys_BSPD
    if pinned is None:
        return attended_BSND
    return torch.cat([pinned, attended_BSND[:, :, pinned.shape[2] :]], dim=2)
