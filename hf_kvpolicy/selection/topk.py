"""From scores, protection and a budget to the rows that stay.

Letters: B batch rows, M map heads, N candidate rows in ascending token order, K rows kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SelectionError

__all__ = ["Kept", "keep_best", "keep_best_reference", "kept_index"]


def keep_best(
    scores_BMN: Tensor,
    open_BMN: Tensor,
    protected_BMN: Tensor,
    budget_rows: Sequence[int],
    *,
    keeps_newest_on_ties: bool = False,
) -> Tensor:
    """Return the mask of rows that stay: every protected row, then the best open ones until the budget is full.

    Among equal scores the lower token position wins (the higher one with `keeps_newest_on_ties`), so candidates must
    come in ascending token order.
    Protection is a mask: a protected row never competes, whatever its score.
    """
    if keeps_newest_on_ties:
        return keep_best(scores_BMN.flip(-1), open_BMN.flip(-1), protected_BMN.flip(-1), budget_rows).flip(-1)
    budget_B11 = torch.tensor(list(budget_rows), device=scores_BMN.device).view(-1, 1, 1)
    competing = open_BMN & ~protected_BMN
    floor = torch.finfo(scores_BMN.dtype).min if scores_BMN.is_floating_point() else torch.iinfo(scores_BMN.dtype).min
    ranked = torch.where(competing, scores_BMN, floor)
    order = torch.argsort(ranked, dim=-1, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(
        2, order, torch.arange(order.shape[2], device=order.device).expand_as(order)
    )
    free = budget_B11 - (protected_BMN & open_BMN).sum(-1, keepdim=True)
    return (protected_BMN & open_BMN) | (competing & (rank < free))


def keep_best_reference(
    scores: Sequence[float], open_rows: Sequence[bool], protected: Sequence[bool], budget_rows: int
) -> list[int]:
    """Plain oracle of `keep_best` for one owner: indices that stay, ascending."""
    kept = [i for i, is_open in enumerate(open_rows) if is_open and protected[i]]
    rest = [i for i, is_open in enumerate(open_rows) if is_open and not protected[i]]
    rest.sort(key=lambda i: (-scores[i], i))
    return sorted(kept + rest[: max(0, budget_rows - len(kept))])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Kept:
    """Gather indices of a selection, left-justified; slots past a batch row's own count are dead."""

    index_BMK: Tensor
    live_BMK: Tensor


def kept_index(keep_BMN: Tensor, counts: Sequence[int]) -> Kept:
    """Turn a keep mask into gather indices in the candidates' order.

    Args:
        keep_BMN: rows that stay.
        counts: rows each owner of a batch row keeps (equal for all heads of that row).

    Raises:
        SelectionError: `counts` is not one whole number per batch row.
    """
    batch, heads, _ = keep_BMN.shape
    if len(counts) != batch:
        raise SelectionError(f"{len(counts)} kept counts were given for {batch} batch rows; give one for each.")
    width = max(counts, default=0)
    slot = torch.where(keep_BMN, keep_BMN.cumsum(-1) - 1, width).clamp_(max=width)
    source = torch.arange(keep_BMN.shape[2], device=keep_BMN.device).expand_as(slot)
    # One spare column collects everything that is dropped; it is cut off again.
    index = torch.zeros((batch, heads, width + 1), dtype=torch.int64, device=keep_BMN.device)
    index = index.scatter_(2, slot, source)[:, :, :width]
    count_B11 = torch.tensor(list(counts), device=keep_BMN.device).view(-1, 1, 1)
    live = torch.arange(width, device=keep_BMN.device).expand(batch, heads, width) < count_B11
    return Kept(index_BMK=index, live_BMK=live)
