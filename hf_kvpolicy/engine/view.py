"""Reading a layer's published rows as selection must see them: with pristine keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..storage import DenseRows

if TYPE_CHECKING:
    from .snapshot import Snapshot

__all__ = ["pristine_keys", "published_rows"]


def published_rows(snapshot: Snapshot, layer: int, device: torch.device | None = None) -> tuple[Tensor, Tensor]:
    """Return keys (of pinned rows the unmoved ones) and values of a layer's slots in use, [B, S, W, D].

    Rows of a pair, which lies with its deeper layer, are copies on the `device` given.
    """
    rows = snapshot.opened(layer, snapshot.width, device=device)
    keys, values = rows.view(snapshot.width)
    return pristine_keys(rows, keys), values


def pristine_keys(rows: DenseRows, attended_BSND: Tensor) -> Tensor:
    """Return attended keys, published ones first, with pinned rows unmoved; the same tensor where nothing is pinned."""
    pinned = rows.pinned_keys_BSPD
    if pinned is None:
        return attended_BSND
    return torch.cat([pinned, attended_BSND[:, :, pinned.shape[2] :]], dim=2)
