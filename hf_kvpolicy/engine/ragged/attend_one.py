"""One decode query over ragged rows whose attention is kept: output and evidence share one softmax.

Letters: B batch rows, S stored heads, O owners (b * S + s), Q query heads, G query heads of one owner, R owners of one
bucket, n rows of one owner, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...ragged_attention import buckets, shows
from ...storage import RaggedView
from ...weighting import PLAIN, Weighting
from ..evidence_blocks import attend_with_logits

__all__ = ["attend_one"]


def attend_one(
    query_BQ1D: Tensor,
    view: RaggedView,
    masks: Sequence[Tensor | None] | None,
    scaling: float,
    weighting: Weighting = PLAIN,
) -> tuple[Tensor, list[Tensor]]:
    """Return the output [B, 1, Q, D], and attention in fp32 whose flat parts follow owners and their slots.

    Args:
        masks: per owner, in slot order, a bool [1, n] or a bias [G, 1, n] in fp32 (-inf where hidden), or None where
            the query sees every row. A query that sees nothing gets zeros.
    """
    rectangle = view.rectangle() if masks is None else None
    if rectangle is not None:
        output, _, attention_BSG1n = attend_with_logits(query_BQ1D, *rectangle, None, scaling, weighting)
        return output, [attention_BSG1n]
    batch, heads, _, dim = query_BQ1D.shape
    queries_O = query_BQ1D.reshape(len(view.starts), 1, -1, 1, dim)
    if masks is None:
        return _attend_buckets(queries_O, view, scaling, weighting, (batch, 1, heads, -1))
    outputs, parts = [], []
    for owner, query_1G1D in enumerate(queries_O):
        keys_nD, values_nD = view.owner(owner)
        mask = masks[owner]
        # [1, 1, 1, n], or [1, G, 1, n] of a bias.
        shown = None if mask is None else mask.to(keys_nD.device).view(1, mask.shape[0], 1, keys_nD.shape[0])
        output, _, attention = attend_with_logits(
            query_1G1D,
            keys_nD[None, None],
            values_nD[None, None],
            shown,
            scaling,
            weighting.of_owners([owner], view.heads),
        )
        outputs.append(output if shown is None else output.masked_fill(~shows(shown).any(), 0.0))
        parts.append(attention)
    return torch.cat(outputs, dim=2).view(batch, 1, heads, -1), parts


def _attend_buckets(
    queries_O1G1D: Tensor, view: RaggedView, scaling: float, weighting: Weighting, shape: tuple[int, ...]
) -> tuple[Tensor, list[Tensor]]:
    """Attend with one call for owners that one strided view shows, where every query sees every row."""
    owners = len(view.starts)
    outputs, parts = [queries_O1G1D] * owners, [queries_O1G1D] * owners
    for bucket in buckets(view):
        query_1Q1D = torch.cat([queries_O1G1D[owner] for owner in bucket], dim=1)
        own = weighting.of_owners(bucket, view.heads)
        output, _, attention_1RG1n = attend_with_logits(query_1Q1D, *view.together(bucket), None, scaling, own)
        shares = zip(bucket, output.chunk(len(bucket), 2), attention_1RG1n.chunk(len(bucket), 1), strict=True)
        for owner, share, part in shares:
            outputs[owner], parts[owner] = share, part
    return torch.cat(outputs, dim=2).view(shape), parts
