"""Hand-made observations for evidence."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_kvpolicy.evidence import LayerObservation


def observation(
    queries_BQTD: Tensor,
    keys_BHTD: Tensor,
    window: int,
    *,
    pads: Sequence[int] | None = None,
    scaling: float = 1.0,
    layer: int = 0,
    model_window: int | None = None,
) -> LayerObservation:
    """Return what the engine would hand over at the end of one left-padded prompt."""
    batch, _, columns, _ = queries_BQTD.shape
    window = min(window, columns)
    start_B = torch.tensor([0] * batch if pads is None else list(pads))
    column = torch.arange(columns)
    seen = column[columns - window :, None] >= column[None]
    if model_window is not None:
        seen = seen & (column[columns - window :, None] - column[None] < model_window)
    real_BT = column[None] >= start_B[:, None]
    mask = seen[None, None] & real_BT[:, None, None]
    return LayerObservation(
        layer=layer,
        queries_BQWD=queries_BQTD[:, :, columns - window :],
        observed_BW=None if pads is None else real_BT[:, columns - window :],
        keys_BHND=keys_BHTD,
        tokens_BMN=(column[None] - start_B[:, None])[:, None],
        visibility=lambda: mask,
        scaling=scaling,
    )
