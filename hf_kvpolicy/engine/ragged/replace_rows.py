"""Every owner takes one row and drops at most one: the decision for all owners of all layers at once.

Letters: P rows of all owners, each owner's new one last; M rows that stay; O owners of all layers; B batch rows, F
columns ever fed, X state channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...allocation import NO_LIMIT_ROWS, FamilyTerms
from ...evidence import MeanAttention
from ...selection import OPEN, class_ranks, row_classes, weakest_rows
from ...storage import RaggedMap
from ..decide import check_finite
from ..token_kinds import PUNCTUATION_TOKEN, SPECIAL_TOKEN

__all__ = ["NewRows", "OwnerLimits", "Replaced", "replace_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewRows:
    """A decode token's rows, and what its query gave to every row."""

    columns_B: Tensor
    tokens_B: Tensor
    kinds_BF: Tensor
    # By slot: attention received in each owner's first n + 1 slots.
    received_P: Tensor
    # By row: whether the query saw it; None where it saw all.
    seen_P: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnerLimits:
    """What each owner's family keeps now."""

    quota_O: Tensor
    most_O: Tensor
    newest_from_O: Tensor
    keeps_punctuation_O: Tensor
    # Whether the owner's batch row brought a token (and not a pad).
    brings_O: Tensor
    brings: tuple[bool, ...]

    @classmethod
    def of(cls, limits: Sequence[tuple[FamilyTerms, int, bool]], device: torch.device) -> OwnerLimits:
        """Return the limits on the device, sent in one piece: (terms, most rows, brings a token) per owner."""
        numbers = [
            (NO_LIMIT_ROWS if t.quota_rows is None else t.quota_rows, most, t.newest_from, t.punctuation, brings)
            for t, most, brings in limits
        ]
        quota, most, newest, punctuation, brings = torch.tensor(numbers, dtype=torch.int64, device=device).unbind(1)
        return cls(
            quota_O=quota,
            most_O=most,
            newest_from_O=newest,
            keeps_punctuation_O=punctuation.bool(),
            brings_O=brings.bool(),
            brings=tuple(brings for _, _, brings in limits),
        )

    @property
    def all_bring(self) -> bool:
        """Whether no batch row brought a pad."""
        return all(self.brings)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replaced:
    """The maps of all layers after the step."""

    maps: tuple[RaggedMap, ...]
    drops_rows: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Joined:
    """All owners' rows with the new ones, ascending by token, owner after owner."""

    columns_P: Tensor
    tokens_P: Tensor
    slots_P: Tensor
    states_PX: Tensor
    owner_P: Tensor
    counts_O: Tensor
    starts_O: Tensor


def replace_rows(
    maps: Sequence[RaggedMap], new: NewRows, limits: OwnerLimits, *, sinks: int, protect: Sequence[int]
) -> Replaced:
    """Return the maps in which every owner holds its new row, without the row that its limits no longer allow.

    A row too many is the weakest of the last class (`selection/classes.py`); a pad leaves again at once.

    Raises:
        SelectionError: a score is not finite; the model's activations are broken.
    """
    heads, per_layer = maps[0].heads, len(maps[0].lengths)
    row_O = torch.arange(per_layer, device=new.columns_B.device).repeat(len(maps)) // heads
    joined = _join(maps, new, limits, row_O)
    row_P = row_O.index_select(0, joined.owner_P)
    kinds_P = new.kinds_BF.flatten().index_select(0, row_P * new.kinds_BF.shape[1] + joined.columns_P)
    classes_P = row_classes(
        joined.tokens_P,
        kinds_P == SPECIAL_TOKEN,
        kinds_P == PUNCTUATION_TOKEN,
        sinks=sinks,
        protect=protect,
        newest_from=limits.newest_from_O.index_select(0, joined.owner_P),
        keeps_punctuation=limits.keeps_punctuation_O.index_select(0, joined.owner_P),
    )
    scores_P = MeanAttention().scores(joined.states_PX, joined.tokens_P)
    ranks_P = class_ranks(scores_P, classes_P, joined.tokens_P)
    owners = row_O.shape[0]
    open_O = torch.zeros(owners, dtype=torch.int64, device=row_O.device)
    open_O.index_add_(0, joined.owner_P, (classes_P == OPEN).long())
    drops_O = (open_O > limits.quota_O) | (joined.counts_O > limits.most_O)
    victim_O = weakest_rows(classes_P, ranks_P, joined.owner_P, owners)
    if not limits.all_bring:
        drops_O = drops_O | ~limits.brings_O
        victim_O = torch.where(limits.brings_O, victim_O, joined.starts_O + joined.counts_O - 1)
    # The one question to the device: which owners drop a row, and whether all scores are numbers.
    *drops, finite = torch.cat([drops_O, torch.isfinite(scores_P).all()[None]]).tolist()
    check_finite([torch.tensor(finite)])
    # A pad that leaves is no loss.
    lost = any(gone for gone, brings in zip(drops, limits.brings, strict=True) if brings)
    return Replaced(maps=_without(maps, joined, victim_O, drops_O, drops), drops_rows=lost)


def _join(maps: Sequence[RaggedMap], new: NewRows, limits: OwnerLimits, row_O: Tensor) -> _Joined:
    """Put every owner's new row behind its own, and add what the query gave to each."""
    device, lengths = row_O.device, [rows for part in maps for rows in part.lengths]
    owners, held = len(lengths), sum(lengths)
    counts_O = torch.cat([part.lengths_O for part in maps]).long() + 1
    starts_O = counts_O.cumsum(0) - counts_O
    owner_P = torch.repeat_interleave(counts_O, output_size=held + owners)
    place_P = torch.arange(held + owners, device=device)
    is_new_P = place_P == (starts_O + counts_O - 1).index_select(0, owner_P)
    source_P = torch.where(is_new_P, held + owner_P, place_P - owner_P)

    def joined(old: list[Tensor], fresh_O: Tensor) -> Tensor:
        return torch.cat([*old, fresh_O]).index_select(0, source_P)

    carried = [part.states_NX for part in maps if part.states_NX is not None]
    slots_P = joined([part.slots() for part in maps], torch.cat([part.next_slots_O for part in maps]).long())
    states_PX = joined(carried, torch.zeros(owners, carried[0].shape[1], device=device))
    received_P = new.received_P.index_select(0, starts_O.index_select(0, owner_P) + slots_P)
    seen_P = torch.ones_like(received_P) if new.seen_P is None else new.seen_P.to(received_P.dtype)
    added_PX = torch.stack([received_P, seen_P], dim=1)
    if not limits.all_bring:
        added_PX = added_PX.masked_fill_(~limits.brings_O[owner_P][:, None], 0.0)
    return _Joined(
        columns_P=joined([part.columns_N for part in maps], new.columns_B[row_O]),
        tokens_P=joined([part.tokens_N for part in maps], new.tokens_B[row_O]),
        slots_P=slots_P,
        states_PX=states_PX.add_(added_PX),
        owner_P=owner_P,
        counts_O=counts_O,
        starts_O=starts_O,
    )


def _without(
    maps: Sequence[RaggedMap], joined: _Joined, victim_O: Tensor, drops_O: Tensor, drops: Sequence[bool]
) -> tuple[RaggedMap, ...]:
    """Return the maps of the rows that stay, as windows on tensors of all layers."""
    lengths = [rows + 1 for part in maps for rows in part.lengths]
    lengths = [rows - gone for rows, gone in zip(lengths, drops, strict=True)]
    total, device = sum(lengths), victim_O.device
    counts_O = joined.counts_O - drops_O.long()
    owner_M = torch.repeat_interleave(counts_O, output_size=total)
    place_M = torch.arange(total, device=device) + (joined.starts_O - (counts_O.cumsum(0) - counts_O)).index_select(
        0, owner_M
    )
    # An owner that drops nothing has its victim behind all rows.
    behind_O = torch.where(drops_O, victim_O, joined.slots_P.shape[0])
    place_M += place_M >= behind_O.index_select(0, owner_M)
    spare_O = torch.where(drops_O, joined.slots_P[victim_O], joined.counts_O).int()
    per_layer = len(maps[0].lengths)
    by_layer = [tuple(lengths[i : i + per_layer]) for i in range(0, len(lengths), per_layer)]
    sizes = [sum(part) for part in by_layer]
    flat = (joined.columns_P, joined.tokens_P, joined.states_PX, joined.slots_P.int())
    columns, tokens, states, slots = (torch.split(part.index_select(0, place_M), sizes) for part in flat)
    counts, spare = torch.split(counts_O.int(), per_layer), torch.split(spare_O, per_layer)
    return tuple(
        RaggedMap(
            columns_N=columns[i],
            tokens_N=tokens[i],
            lengths_O=counts[i],
            lengths=part,
            heads=maps[0].heads,
            states_NX=states[i],
            slots_N=slots[i],
            spare_O=spare[i],
        )
        for i, part in enumerate(by_layer)
    )
