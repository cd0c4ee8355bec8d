"""One decode query over ragged rows whose attention is kept: output and evidence share one softmax.

Letters: B batch rows, S stored heads, O owners (b * S + s), Q query heads, G query heads of one owner, n rows of one
owner, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...storage import RaggedView
from ..evidence_blocks import attend_with_logits

__all__ = ["attend_one"]


def attend_one(
    query_BQ1D: Tensor, view: RaggedView, masks: Sequence[Tensor | None] | None, scaling: float
) -> tuple[Tensor, list[Tensor]]:
    """Return the output [B, 1, Q, D], and attention in fp32 whose flat parts follow owners and their slots.

    Args:
        masks: per owner a bool [1, n] in slot order, or None where the query sees every row. A query that sees nothing
            gets zeros.
    """
    rectangle = view.rectangle() if masks is None else None
    if rectangle is not None:
        output, _, attention_BSG1n = attend_with_logits(query_BQ1D, *rectangle, None, scaling)
        return output, [attention_BSG1n]
    batch, heads, _, dim = query_BQ1D.shape
    queries_O = query_BQ1D.reshape(len(view.starts), 1, -1, 1, dim)
    outputs, parts = [], []
    for owner, query_1G1D in enumerate(queries_O):
        keys_nD, values_nD = view.owner(owner)
        mask = None if masks is None else masks[owner]
        shown = None if mask is None else mask.to(keys_nD.device)[None, None]
        output, _, attention = attend_with_logits(
            query_1G1D, keys_nD[None, None], values_nD[None, None], shown, scaling
        )
        outputs.append(output if shown is None else output.masked_fill(~shown.any(), 0.0))
        parts.append(attention)
    return torch.cat(outputs, dim=2).view(batch, 1, heads, -1), parts
