"""Selection by class of row: a class stays whole before any row of the next one does.

Used where a head protects several kinds of rows and a limit may still be smaller than all of them together.

Letters: N rows of one owner, P rows of all owners, owner after owner, O owners.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "NEWEST",
    "OPEN",
    "PINNED",
    "PUNCTUATION",
    "SPECIAL",
    "class_ranks",
    "keep_by_class",
    "keep_by_class_reference",
    "row_classes",
    "weakest_rows",
]

# Which rows go last, ascending.
PINNED, SPECIAL, NEWEST, PUNCTUATION, OPEN = range(5)


def row_classes(
    tokens: Tensor,
    is_special: Tensor,
    is_punctuation: Tensor,
    *,
    sinks: int,
    protect: Sequence[int],
    newest_from: Tensor | int,
    keeps_punctuation: Tensor | bool,
) -> Tensor:
    """Return the class of each row, int64; a row of several classes has the first.

    Args:
        tokens: token positions.
        sinks: how many of the first tokens are protected for ever.
        protect: further token positions that are.
        newest_from: first token position of the newest rows (per row, or for all).
        keeps_punctuation: whether the row's owner keeps punctuation.
    """
    classes = torch.full_like(tokens, OPEN, dtype=torch.int64)
    classes = torch.where(is_punctuation & keeps_punctuation, PUNCTUATION, classes)
    classes = torch.where(tokens >= newest_from, NEWEST, classes)
    classes = torch.where(is_special, SPECIAL, classes)
    classes = torch.where(tokens < sinks, PINNED, classes)
    if protect:
        classes = torch.where(torch.isin(tokens, torch.tensor(protect, device=tokens.device)), PINNED, classes)
    return classes


def class_ranks(scores: Tensor, classes: Tensor, tokens: Tensor) -> Tensor:
    """Return what rows of one class compete by: their score, and their position among the newest rows."""
    return torch.where(classes == NEWEST, tokens.to(scores.dtype), scores)


def keep_by_class(classes_N: Tensor, ranks_N: Tensor, quota_rows: int | None, most_rows: int) -> Tensor | None:
    """Return which rows of one owner stay, ascending; None where all do.

    Args:
        classes_N: classes of rows in ascending token order.
        ranks_N: what rows of one class compete by; the lower position wins a tie.
        quota_rows: how many open rows may stay; None for no limit.
        most_rows: how many rows may stay.
    """
    rows = classes_N.shape[0]
    kept = rows
    if quota_rows is not None:
        kept -= max(0, int((classes_N == OPEN).sum()) - quota_rows)
    kept = min(kept, most_rows)
    if kept >= rows:
        return None
    order = torch.argsort(ranks_N, descending=True, stable=True)
    order = order[torch.argsort(classes_N[order], stable=True)]
    return order[:kept].sort().values


def keep_by_class_reference(
    classes: Sequence[int], ranks: Sequence[float], quota_rows: int | None, most_rows: int
) -> list[int]:
    """Plain oracle of `keep_by_class`, and of `weakest_rows` applied until nothing is over a limit."""
    stay = sorted(range(len(classes)), key=lambda i: (classes[i], -ranks[i], i))
    closed = sum(kind < OPEN for kind in classes)
    if quota_rows is not None:
        stay = stay[: closed + quota_rows]
    return sorted(stay[:most_rows])


def weakest_rows(classes_P: Tensor, ranks_P: Tensor, owner_P: Tensor, owners: int) -> Tensor:
    """Return which row of each owner goes first, int64 [O]: of the last class, the lowest rank, the highest position.

    Every owner has a row, and rows of one owner come in ascending token order.
    """
    last_O = torch.zeros(owners, dtype=classes_P.dtype, device=classes_P.device)
    last_O.scatter_reduce_(0, owner_P, classes_P, "amax")
    ranked_P = torch.where(classes_P == last_O.index_select(0, owner_P), ranks_P, torch.inf)
    lowest_O = torch.full((owners,), torch.inf, dtype=ranks_P.dtype, device=ranks_P.device)
    lowest_O.scatter_reduce_(0, owner_P, ranked_P, "amin")
    place_P = torch.arange(owner_P.shape[0], device=owner_P.device)
    place_P = torch.where(ranked_P == lowest_O.index_select(0, owner_P), place_P, -1)
    return torch.full((owners,), -1, dtype=torch.int64, device=owner_P.device).scatter_reduce_(
        0, owner_P, place_P, "amax"
    )
