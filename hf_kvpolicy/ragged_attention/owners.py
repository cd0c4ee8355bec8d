"""Ragged attention through SDPA, an owner at a time: what runs on CPU, and anywhere else that no kernel is admitted.

One call serves several owners where one strided view shows them all: a rectangle, or a bucket of equally long owners
at even distances. Rows are never copied to make one.

Letters: B batch rows, S stored heads, O owners (B * S), Q query heads, G query heads per owner, T queries, D head
dimension, n rows of one owner, R owners of one bucket.
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
# Putting fewer owners together takes longer than a call for each.
_LEAST_BUCKET = 4


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
    fold = tokens == 1 and not _threads_share_heads(query_BQTD, group)
    # What SDPA takes for heads and for queries: the group's queries as rows of one head, or as heads on the same rows.
    sharing, width = (1, group) if fold else (group, tokens)
    query_O = query_BQTD.reshape(owners, 1, sharing, width, dim).unbind(0)
    outputs = _attend_buckets(query_O, view, group, scaling, dropout) if masks is None else {}
    keys_1HND, values_1HND = view.keys_ND.expand(1, sharing, -1, -1), view.values_ND.expand(1, sharing, -1, -1)
    for owner, (start, rows) in enumerate(zip(view.starts, view.lengths, strict=True)):
        if owner not in outputs:
            outputs[owner] = functional.scaled_dot_product_attention(
                query_O[owner],
                keys_1HND.narrow(2, start, rows),
                values_1HND.narrow(2, start, rows),
                attn_mask=None if masks is None else _folded(masks[owner], sharing, query_BQTD),
                dropout_p=dropout,
                scale=scaling,
            )
    together = torch.cat([outputs[owner] for owner in range(owners)])
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


def _attend_buckets(
    query_O: Sequence[Tensor], view: RaggedView, group: int, scaling: float, dropout: float
) -> dict[int, Tensor]:
    """Return the outputs of owners that share a bucket, shaped like their queries."""
    outputs: dict[int, Tensor] = {}
    if len(view.lengths) - len(set(view.lengths)) < _LEAST_BUCKET - 1:
        return outputs
    _, sharing, width, dim = query_O[0].shape
    for bucket in buckets(view):
        if len(bucket) >= _LEAST_BUCKET:
            query_1QTD = torch.cat([query_O[owner] for owner in bucket]).view(1, len(bucket) * group, -1, dim)
            keys_1RnD, values_1RnD = (rows[None] for rows in view.together(bucket))
            output_1TQD = grouped_attention(query_1QTD, keys_1RnD, values_1RnD, None, scaling=scaling, dropout=dropout)
            shares = output_1TQD.transpose(1, 2).reshape(len(bucket), sharing, width, -1).chunk(len(bucket))
            outputs.update(zip(bucket, shares, strict=True))
    return outputs


def _folded(mask: Tensor | None, sharing: int, like: Tensor) -> Tensor | None:
    """Return what SDPA takes: of a bias, heads folded as their queries are."""
    if mask is None or mask.dtype is torch.bool:
        return mask
    return mask.to(like).reshape(1, sharing, mask.shape[0] * mask.shape[1] // sharing, mask.shape[2])


def _stacked(masks: Sequence[Tensor | None], view: RaggedView) -> Tensor:
    """Return the masks of owners as one, [B, S, T, n], or of biases [B, Q, T, n]."""
    given = [mask for mask in masks if mask is not None]
    heads = view.heads if given[0].dtype is torch.bool else view.heads * given[0].shape[0]
    return torch.stack(given).view(view.batch, heads, *given[0].shape[-2:])


def _threads_share_heads(query_BQTD: Tensor, group: int) -> bool:
    return query_BQTD.device.type == "cpu" and 1 < group <= _LARGEST_SHARED_GROUP and torch.get_num_threads() > 1
