"""Attention over a ragged view written plainly, owner by owner: the oracle of the fast paths, and `eager` itself.

Letters: B batch rows, Q query heads, T queries, D head dimension, G query heads per owner, n rows of one owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..storage import RaggedView
from ..weighting import PLAIN, Weighting

__all__ = ["attend_eager", "attend_reference", "shows"]


def attend_reference(
    query_BQTD: Tensor,
    view: RaggedView,
    masks: Sequence[Tensor | None] | None,
    *,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """Softmax attention in fp32 (fp64 for fp64 rows), [B, T, Q, D] in the query's dtype."""
    return _attend(query_BQTD, view, masks, scaling, dropout, torch.promote_types(query_BQTD.dtype, torch.float32))


def attend_eager(
    query_BQTD: Tensor,
    view: RaggedView,
    masks: Sequence[Tensor | None] | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    weighting: Weighting = PLAIN,
) -> Tensor:
    """The arithmetic of transformers' eager attention: products in the model's dtype, softmax in fp32. [B, T, Q, D]."""
    return _attend(query_BQTD, view, masks, scaling, dropout, query_BQTD.dtype, weighting)


def shows(mask: Tensor) -> Tensor:
    """Return which rows a mask, or a bias, lets a query see."""
    return mask if mask.dtype is torch.bool else mask > float("-inf")


def _attend(
    query_BQTD: Tensor,
    view: RaggedView,
    masks: Sequence[Tensor | None] | None,
    scaling: float,
    dropout: float,
    dtype: torch.dtype,
    weighting: Weighting = PLAIN,
) -> Tensor:
    batch, heads, tokens, dim = query_BQTD.shape
    owners = len(view.starts)
    query_OGTD = query_BQTD.to(dtype).reshape(owners, -1, tokens, dim)
    outputs = []
    for owner in range(owners):
        keys_nD, values_nD = view.owner(owner)
        logits_GTn = weighting.cap_(query_OGTD[owner] @ keys_nD.to(dtype).T * scaling)
        mask_Tn = None if masks is None else masks[owner]
        if mask_Tn is not None and mask_Tn.dtype is torch.bool:
            logits_GTn = logits_GTn.masked_fill(~mask_Tn, float("-inf"))
        elif mask_Tn is not None:
            logits_GTn = logits_GTn + mask_Tn.to(logits_GTn.device)
        logits_1GTn = logits_GTn.to(torch.promote_types(dtype, torch.float32))[None]
        weights_GTn = weighting.of_owners([owner], view.heads).weights(logits_1GTn)[0].to(dtype)
        if mask_Tn is not None:  # a query that sees nothing has no softmax: its output is zero
            weights_GTn = weights_GTn.masked_fill(~shows(mask_Tn).any(-1, keepdim=True), 0.0)
        outputs.append(functional.dropout(weights_GTn, dropout, training=dropout > 0) @ values_nD.to(dtype))
    return torch.stack(outputs).view(batch, heads, tokens, -1).transpose(1, 2).contiguous().to(query_BQTD.dtype)
