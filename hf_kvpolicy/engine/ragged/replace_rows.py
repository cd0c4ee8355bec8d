"""Every owner takes one row and drops at most one: the decision for all owners of all layers at once.

A row that dies becomes the spare slot and nothing else moves: the maps stay in the order of slots (`RaggedMap.opened`).

Letters: P slots of all owners, the spare one filled; O owners of all layers; B batch rows, F columns ever fed, X state
channels.
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
    # By slot, in each owner's first n + 1: attention received, and whether the query saw it (None where it saw all).
    received_P: Tensor
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
class _Filled:
    """All owners' slots with the new rows in them: a copy, so that what is published stays."""

    columns_P: Tensor
    tokens_P: Tensor
    states_PX: Tensor
    owner_P: Tensor
    spare_O: Tensor
    slot_counts_O: Tensor
    starts_O: Tensor


def replace_rows(
    maps: Sequence[RaggedMap], new: NewRows, limits: OwnerLimits, *, sinks: int, protect: Sequence[int]
) -> Replaced:
    """Return the maps in which every owner holds its new row, without the row that its limits no longer allow.

    A row too many is the weakest of the last class (`selection/classes.py`); a pad leaves again at once.

    Raises:
        SelectionError: a score is not finite; the model's activations are broken.
    """
    maps = [part.opened() for part in maps]
    row_O = torch.arange(len(maps[0].lengths), device=new.columns_B.device).repeat(len(maps)) // maps[0].heads
    filled = _fill(maps, new, limits, row_O)
    owner_P, owners = filled.owner_P, row_O.shape[0]
    kinds_P = _kinds(new.kinds_BF, filled.columns_P, owner_P, row_O)
    classes_P = row_classes(
        filled.tokens_P,
        kinds_P == SPECIAL_TOKEN,
        kinds_P == PUNCTUATION_TOKEN,
        sinks=sinks,
        protect=protect,
        newest_from=limits.newest_from_O.int().index_select(0, owner_P),
        keeps_punctuation=limits.keeps_punctuation_O.index_select(0, owner_P),
    )
    scores_P = MeanAttention().scores(filled.states_PX, filled.tokens_P)
    ranks_P = class_ranks(scores_P, classes_P, filled.tokens_P)
    # Open rows up to and with each slot: an owner's are the difference between its ends.
    open_P = (classes_P == OPEN).cumsum(0)
    open_O = open_P.index_select(0, filled.starts_O + filled.slot_counts_O - 1).diff(prepend=open_P.new_zeros(1))
    drops_O = (open_O > limits.quota_O) | (filled.slot_counts_O > limits.most_O)
    victim_O = weakest_rows(classes_P, ranks_P, filled.tokens_P, owner_P, owners) - filled.starts_O
    if not limits.all_bring:
        drops_O = drops_O | ~limits.brings_O
        victim_O = torch.where(limits.brings_O, victim_O, filled.spare_O)
    # Asked of the device once: which owners drop a row, and whether all scores are numbers.
    *drops, finite = torch.cat([drops_O, torch.isfinite(scores_P.sum())[None]]).tolist()
    check_finite([torch.tensor(finite)])
    # A pad that leaves is no loss.
    lost = any(gone for gone, brings in zip(drops, limits.brings, strict=True) if brings)
    return Replaced(maps=_maps(maps, filled, victim_O, drops_O, drops), drops_rows=lost)


def _fill(maps: Sequence[RaggedMap], new: NewRows, limits: OwnerLimits, row_O: Tensor) -> _Filled:
    """Put every owner's new row into its spare slot, and add what the query gave to each row."""
    slot_counts_O = torch.cat([part.lengths_O for part in maps]).long() + 1
    spare_O = torch.cat([part.next_slots_O for part in maps]).long()
    starts_O = slot_counts_O.cumsum(0) - slot_counts_O
    owner_P = torch.repeat_interleave(slot_counts_O, output_size=sum(sum(part.slot_counts) for part in maps))
    columns_P = torch.cat([part.columns_P for part in maps])
    tokens_P = torch.cat([part.tokens_P for part in maps])
    states_PX = torch.cat([part.states_PX for part in maps if part.states_PX is not None])
    at_O = starts_O + spare_O
    columns_P.index_copy_(0, at_O, new.columns_B[row_O])
    tokens_P.index_copy_(0, at_O, new.tokens_B[row_O])
    states_PX.index_fill_(0, at_O, 0.0)
    received_P, seen_P = new.received_P, new.seen_P
    if not limits.all_bring:
        brings_P = limits.brings_O.index_select(0, owner_P)
        received_P = received_P * brings_P
        seen_P = brings_P if seen_P is None else seen_P & brings_P
    states_PX[:, 0] += received_P
    states_PX[:, 1] += 1 if seen_P is None else seen_P
    return _Filled(
        columns_P=columns_P,
        tokens_P=tokens_P,
        states_PX=states_PX,
        owner_P=owner_P,
        spare_O=spare_O,
        slot_counts_O=slot_counts_O,
        starts_O=starts_O,
    )


def _kinds(kinds_BF: Tensor, columns_P: Tensor, owner_P: Tensor, row_O: Tensor) -> Tensor:
    """Return the kind of every slot's token."""
    if kinds_BF.shape[0] == 1:
        return kinds_BF[0].index_select(0, columns_P)
    return kinds_BF.flatten().index_select(0, (row_O * kinds_BF.shape[1]).index_select(0, owner_P) + columns_P)


def _maps(
    maps: Sequence[RaggedMap], filled: _Filled, victim_O: Tensor, drops_O: Tensor, drops: Sequence[bool]
) -> tuple[RaggedMap, ...]:
    """Return the open maps after the step, as windows on tensors of all layers."""
    flat: tuple[Tensor, ...] = (filled.columns_P, filled.tokens_P, filled.states_PX)
    grows_O = (~drops_O).long()
    counts_O = filled.slot_counts_O + grows_O
    if not all(drops):
        # An owner that keeps all its rows gets a dead slot behind them.
        total = flat[0].shape[0] + drops.count(False)
        owner_P = torch.repeat_interleave(counts_O, output_size=total)
        behind_O = grows_O.cumsum(0) - grows_O
        source_P = torch.arange(total, device=owner_P.device) - behind_O.index_select(0, owner_P)
        source_P.clamp_(max=flat[0].shape[0] - 1)
        flat = tuple(part.index_select(0, source_P) for part in flat)
    spare_O = torch.where(drops_O, victim_O, filled.slot_counts_O).int()
    old = [rows for part in maps for rows in part.lengths]
    rows = [n + 1 - gone for n, gone in zip(old, drops, strict=True)]
    per_layer = len(maps[0].lengths)
    by_layer = [tuple(rows[i : i + per_layer]) for i in range(0, len(rows), per_layer)]
    sizes = [sum(part) + per_layer for part in by_layer]
    columns, tokens, states = (torch.split(part, sizes) for part in flat)
    counts, spare = torch.split((counts_O - 1).int(), per_layer), torch.split(spare_O, per_layer)
    return tuple(
        RaggedMap(
            columns_P=columns[i],
            tokens_P=tokens[i],
            lengths_O=counts[i],
            lengths=part,
            heads=maps[0].heads,
            states_PX=states[i],
            spare_O=spare[i],
        )
        for i, part in enumerate(by_layer)
    )
