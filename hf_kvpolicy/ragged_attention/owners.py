"""Ragged attention through SDPA, an owner at a time: what runs on CPU, and anywhere else that no kernel is admitted.

One call serves several owners where one strided view shows them all: a rectangle, or a bucket of equally long owners
at even distances. Rows are never copied to make one.

Letters: B batch rows, S stored heads, O owners (B * S), Q query heads, G query heads per owner, T queries, D head
dimension, n rows of one owner.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ..backends import grouped_attention
from ..storage import RaggedView

__all__ = ["attend_owners", "buckets"]

# SDPA on CPU shares out heads among threads, but not the rows of one head. One owner's queries are then faster as
# heads over a KV head of stride zero; in larger groups reading the rows once for all queries outweighs the threads.
_LARGEST_SHARED_GROUP = 4


def attend_owners(
    query_BQTD: Tensor,
    view: RaggedView,
    masks: Sequence[Tensor | None] | None,
    *,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """Exact attention over unequal owners, [B, T, Q, D]. `masks` as in `attend_ragged`."""
    rectangle = view.rectangle()
    if rectangle is not None and (masks is None or all(mask is not None for mask in masks)):
        mask_BSTn = None if masks is None else _stacked(masks, view)
        return grouped_attention(query_BQTD, *rectangle, mask_BSTn, scaling=scaling, dropout=dropout)
    batch, heads, tokens, dim = query_BQTD.shape
    owners = len(view.starts)
    group = batch * heads // owners
    query_O = query_BQTD.reshape(owners, 1, group, tokens, dim).unbind(0)
    outputs: dict[int, Tensor] = {}
    if masks is None and len(set(view.lengths)) < owners:
        for bucket in buckets(view):
            if len(bucket) > 1:
                query_1QTD = torch.cat([query_O[owner] for owner in bucket], dim=1)
                outputs.update(zip(bucket, _attend_bucket(query_1QTD, view, bucket, scaling, dropout), strict=True))
    fold = tokens == 1 and not _threads_share_heads(query_BQTD, group)
    sharing, rows_of_query = (1, group) if fold else (group, tokens)
    for owner in range(owners):
        if owner in outputs:
            continue
        keys_nD, values_nD = view.owner(owner)
        outputs[owner] = functional.scaled_dot_product_attention(
            query_O[owner].view(1, sharing, rows_of_query, dim),
            keys_nD.expand(1, sharing, -1, -1),
            values_nD.expand(1, sharing, -1, -1),
            attn_mask=None if masks is None else masks[owner],
            dropout_p=dropout,
            scale=scaling,
        )
    together = torch.cat([outputs[owner].view(1, group, tokens, -1) for owner in range(owners)])
    if tokens == 1:
        return together.view(batch, 1, heads, -1)
    return together.view(batch, heads, tokens, -1).transpose(1, 2).contiguous()


def buckets(view: RaggedView) -> list[list[int]]:
    """Return all owners, those together that one strided view shows: equally long, at even distances, ascending."""
    runs: list[list[int]] = []
    open_runs: dict[int, list[int]] = {}
    starts = view.starts
    for owner in sorted(range(len(starts)), key=starts.__getitem__):
        run = open_runs.get(view.lengths[owner])
        if run is not None and (len(run) == 1 or starts[owner] - starts[run[-1]] == starts[run[1]] - starts[run[0]]):
            run.append(owner)
        else:
            runs.append([owner])
            open_runs[view.lengths[owner]] = runs[-1]
    return runs


def _attend_bucket(
    query_1QTD: Tensor, view: RaggedView, bucket: list[int], scaling: float, dropout: float
) -> tuple[Tensor, ...]:
    part = RaggedView(
        keys_ND=view.keys_ND,
        values_ND=view.values_ND,
        heads=len(bucket),
        starts=tuple(view.starts[owner] for owner in bucket),
        lengths=tuple(view.lengths[owner] for owner in bucket),
    )
    rectangle = part.rectangle()
    assert rectangle is not None
    output_1TQD = grouped_attention(query_1QTD, *rectangle, None, scaling=scaling, dropout=dropout)
    return output_1TQD.transpose(1, 2).chunk(len(bucket), dim=1)


def _stacked(masks: Sequence[Tensor | None], view: RaggedView) -> Tensor:
    given = [mask for mask in masks if mask is not None]
    return torch.stack(given).view(view.batch, view.heads, *given[0].shape)


def _threads_share_heads(query_BQTD: Tensor, group: int) -> bool:
    return query_BQTD.device.type == "cpu" and 1 < group <= _LARGEST_SHARED_GROUP and torch.get_num_threads() > 1
