"""Selection by class of row: a class stays whole before any row of the next one does.

Used where a head protects several kinds of rows and a limit may still be smaller than all of them together.

Letters: N rows of one owner, P rows of all owners, O owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "NEWEST",
    "OPEN",
    "PINNED",
    "PUNCTUATION",
    "SPECIAL",
    "ProtectedParts",
    "are_open",
    "class_ranks",
    "keep_by_class",
    "keep_by_class_reference",
    "lowest_rows",
    "row_classes",
    "weakest_rows",
]

# Which rows go last, ascending.
PINNED, SPECIAL, NEWEST, PUNCTUATION, OPEN = range(5)

# Above every rank (scores are attention, the rank of a newest row is its position).
_BEYOND = 1e30
# Rows of all owners that a place can tell apart; the bits above hold a token position.
_PLACE_BITS = 36


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProtectedParts:
    """What an owner protects besides special tokens."""

    # How many of the first tokens stay for ever, and further token positions that do.
    sinks: int
    protect: Sequence[int]
    # First token position of the newest rows (per row, or for all).
    newest_from: Tensor | int
    # Whether the row's owner keeps punctuation.
    punctuation: Tensor | bool

    def pinned(self, tokens: Tensor) -> Tensor:
        """Return which rows stay for ever, bool."""
        pinned = tokens < self.sinks
        if self.protect:
            pinned |= torch.isin(tokens, torch.tensor(self.protect, device=tokens.device))
        return pinned


def row_classes(tokens: Tensor, is_special: Tensor, is_punctuation: Tensor, parts: ProtectedParts) -> Tensor:
    """Return the class of each row, int8, by its token position and kind; a row of several classes has the first."""
    # Arithmetic on bytes costs a fraction of choosing by a mask.
    above = (is_punctuation & parts.punctuation).to(torch.int8) * (OPEN - PUNCTUATION)
    above = torch.maximum(above, (tokens >= parts.newest_from).to(torch.int8) * (OPEN - NEWEST))
    above = torch.maximum(above, is_special.to(torch.int8) * (OPEN - SPECIAL))
    return OPEN - torch.maximum(above, parts.pinned(tokens).to(torch.int8) * (OPEN - PINNED))


def are_open(tokens: Tensor, is_special: Tensor, is_punctuation: Tensor, parts: ProtectedParts) -> Tensor:
    """Return which rows are of the last class, bool: what `row_classes` says, in fewer steps."""
    kept = (is_punctuation & parts.punctuation) | is_special | (tokens >= parts.newest_from)
    return ~(kept | parts.pinned(tokens))


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


def weakest_rows(classes_P: Tensor, ranks_P: Tensor, tokens_P: Tensor, owner_P: Tensor, owners: int) -> Tensor:
    """Return which row of each owner goes first, int64 [O]: of the last class, the lowest rank, the highest position.

    Every owner has a row. Ranks are finite; the rows of one owner have different token positions, in any order.
    """
    device = owner_P.device
    # As floats, because a scatter of bytes takes twice the time.
    classes_P = classes_P.to(ranks_P.dtype)
    last_O = torch.zeros(owners, dtype=ranks_P.dtype, device=device).scatter_reduce_(0, owner_P, classes_P, "amax")
    # A penalty leaves the ranks of the last class as they are.
    ranked_P = ranks_P.add(classes_P != last_O.index_select(0, owner_P), alpha=_BEYOND)
    return lowest_rows(ranked_P, tokens_P, owner_P, owners)[0]


def lowest_rows(ranks_P: Tensor, tokens_P: Tensor, owner_P: Tensor, owners: int) -> tuple[Tensor, Tensor]:
    """Return which row of each owner has the lowest rank, among equals the highest position, int64 [O]; and that rank.

    A rank may be infinite: an owner with no other has rank inf.
    """
    device = owner_P.device
    lowest_O = torch.full((owners,), torch.inf, dtype=ranks_P.dtype, device=device)
    lowest_O.scatter_reduce_(0, owner_P, ranks_P, "amin")
    # Among equals the highest position, its place in the lower digits; an owner hardly ever has more than one.
    place_E = (ranks_P == lowest_O.index_select(0, owner_P)).nonzero()[:, 0]
    keys_E = (tokens_P.index_select(0, place_E).long() << _PLACE_BITS) + place_E
    keys_O = torch.zeros(owners, dtype=torch.int64, device=device)
    keys_O.scatter_reduce_(0, owner_P.index_select(0, place_E), keys_E, "amax")
    return keys_O & ((1 << _PLACE_BITS) - 1), lowest_O
