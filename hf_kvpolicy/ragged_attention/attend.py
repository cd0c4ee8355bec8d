"""One call that attends over a ragged view with whatever may read it here."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..storage import RaggedView
from ..weighting import PLAIN, Weighting
from .choose import ragged_backend
from .flash_varlen import attend_flash_varlen
from .owners import attend_owners
from .reference import attend_eager

__all__ = ["attend_ragged"]


def attend_ragged(
    backend: str,
    query_BQTD: Tensor,
    view: RaggedView,
    masks: Sequence[Tensor | None] | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    causal: bool = False,
    weighting: Weighting = PLAIN,
) -> Tensor:
    """Attend over owners of unequal length, exactly; returns [B, T, Q, D]. No row is padded, gathered or repeated.

    Args:
        backend: transformers' name of the model's backend.
        query_BQTD: query heads are batch-major over the stored heads: Q is a multiple of `view.heads`.
        masks: per owner a bool [T, n], True where a query sees a row, or a bias [G, T or 1, n] in fp32 that is added to
            logits, -inf where it does not, or None where every query sees every row. A query that sees nothing gets
            zeros. Kernels take none of them.
        causal: instead of masks: the last T rows of every owner are the queries' own tokens, and query t does not see
            the T - 1 - t rows after its own. Kernels need no mask for it.
        weighting: what the layer does beyond a softmax; kernels do not know it, the plain path does.

    Raises:
        BackendAdmissionError: the backend cannot read ragged rows.
    """
    masked = masks is not None and any(mask is not None for mask in masks)
    tokens = query_BQTD.shape[2]
    chosen = ragged_backend(backend, query_BQTD, view, masked=masked, dropout=dropout, plain_softmax=weighting.is_plain)
    if chosen == "triton":
        from .triton_decode import attend_decode  # imports triton, which is not always there

        return attend_decode(query_BQTD, view, scaling=scaling)
    if chosen == "flash_varlen":
        return attend_flash_varlen(backend, query_BQTD, view, scaling=scaling, causal=causal and tokens > 1)
    if masks is not None:
        # Masks are made where the model's input lies, and layers may lie elsewhere.
        masks = [None if mask is None else mask.to(query_BQTD.device) for mask in masks]
    if not masked:
        masks = _causal(view, tokens) if causal and tokens > 1 else None
    if chosen == "eager":
        return attend_eager(query_BQTD, view, masks, scaling=scaling, dropout=dropout, weighting=weighting)
    return attend_owners(query_BQTD, view, masks, scaling=scaling, dropout=dropout)


def _causal(view: RaggedView, tokens: int) -> list[Tensor]:
    device = view.keys_ND.device
    return [torch.ones(tokens, rows, dtype=torch.bool, device=device).tril_(rows - tokens) for rows in view.lengths]
