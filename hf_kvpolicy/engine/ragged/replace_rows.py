"""Every owner takes one row and drops at most one: the decision for all owners of all layers at once.

A row that dies becomes the spare slot and nothing else moves: the maps stay in the order of slots (`RaggedMap.opened`).

Letters: P slots of all owners, the spare one filled; O owners of all layers; B batch rows, F columns ever fed, X state
channels; K kinds of owners (one family in one batch row); C owners that hold no open row, L their slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...allocation import NO_LIMIT_ROWS, FamilyTerms
from ...evidence import MeanAttention
from ...selection import ProtectedParts, are_open, class_ranks, lowest_rows, row_classes, weakest_rows
from ...storage import RaggedMap
from ..decide import check_finite
from ..token_kinds import PUNCTUATION_TOKEN, SPECIAL_TOKEN

__all__ = ["NewRows", "OwnerKind", "OwnerLimits", "Replaced", "replace_rows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NewRows:
    """A decode token's rows, and what its query gave to every row."""

    columns_B: Tensor
    tokens_B: Tensor
    # Of every column ever fed: its token position (of a pad, any) and kind.
    tokens_BF: Tensor
    kinds_BF: Tensor
    # By slot, in each owner's first n + 1: attention received, and whether the query saw it (None where it saw all).
    received_P: Tensor
    seen_P: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerKind:
    """What owners of one family in one batch row keep now."""

    terms: FamilyTerms
    row: int
    most_rows: int
    # Whether the batch row brought a token (and not a pad).
    brings: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnerLimits:
    """What each owner keeps now, as numbers on the device."""

    kinds: tuple[OwnerKind, ...]
    kind_O: Tensor
    row_K: Tensor
    quota_K: Tensor
    most_K: Tensor
    newest_from_K: Tensor
    keeps_punctuation_K: Tensor
    brings_K: Tensor
    # The kind of each owner on the host.
    kind_of_owners: tuple[int, ...]

    @classmethod
    def of(cls, kinds: Sequence[OwnerKind], kind_of_owners: Sequence[int], device: torch.device) -> OwnerLimits:
        """Return the limits on the device, sent in one piece."""
        numbers = []
        for kind in kinds:
            terms = kind.terms
            open_rows = NO_LIMIT_ROWS if terms.quota_rows is None else terms.quota_rows
            numbers += [kind.row, open_rows, kind.most_rows, terms.newest_from, terms.punctuation, kind.brings]
        sent = torch.tensor([*numbers, *kind_of_owners], dtype=torch.int64, device=device)
        row, quota, most, newest, punctuation, brings = sent[: len(numbers)].view(-1, 6).unbind(1)
        return cls(
            kinds=tuple(kinds),
            kind_O=sent[len(numbers) :],
            row_K=row,
            quota_K=quota,
            most_K=most,
            newest_from_K=newest,
            keeps_punctuation_K=punctuation.bool(),
            brings_K=brings.bool(),
            kind_of_owners=tuple(kind_of_owners),
        )

    @property
    def all_bring(self) -> bool:
        """Whether no batch row brought a pad."""
        return all(kind.brings for kind in self.kinds)


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
    filled = _fill(maps, new, limits)
    # A row's class depends on its column and on the kind of its owner: fewer numbers than there are rows.
    tokens_KF, special_KF, punctuation_KF = _columns_of_kinds(new, limits)
    parts = ProtectedParts(
        sinks=sinks,
        protect=protect,
        newest_from=limits.newest_from_K[:, None],
        punctuation=limits.keeps_punctuation_K[:, None],
    )
    place_P = _table_places(filled.columns_P, filled.slot_counts_O, limits, tokens_KF.shape[1])
    # What is not open goes after everything that is: of an owner with an open row, the weakest is one.
    closed_KF = torch.where(are_open(tokens_KF, special_KF, punctuation_KF, parts), 0.0, torch.inf)
    closed_P = closed_KF.flatten().index_select(0, place_P)
    scores_P = MeanAttention().scores(filled.states_PX, filled.tokens_P)
    owners, kind_O = limits.kind_O.shape[0], limits.kind_O
    place_O, lowest_O = lowest_rows(scores_P + closed_P, filled.tokens_P, filled.owner_P, owners)
    # Open rows up to and with each slot: an owner's are the difference between its ends.
    open_P = (closed_P == 0).cumsum(0)
    open_O = open_P.index_select(0, filled.starts_O + filled.slot_counts_O - 1).diff(prepend=open_P.new_zeros(1))
    drops_O = (open_O > limits.quota_K[kind_O]) | (filled.slot_counts_O > limits.most_K[kind_O])
    # Asked of the device once: which owners drop a row, which of them none that is open, whether scores are numbers.
    answers = torch.cat([drops_O, lowest_O == torch.inf, torch.isfinite(scores_P.sum())[None]]).tolist()
    check_finite(answers[-1:])
    drops = answers[:owners]
    stuck = [owner for owner in range(owners) if drops[owner] and answers[owners + owner]]
    if stuck:
        classes_P = row_classes(tokens_KF, special_KF, punctuation_KF, parts).flatten().index_select(0, place_P)
        place_O = _replace_stuck(place_O, stuck, filled, scores_P, classes_P)
    victim_O, lost = place_O - filled.starts_O, any(drops)
    if not limits.all_bring:
        brings_O = limits.brings_K[kind_O]
        drops_O = drops_O | ~brings_O
        victim_O = torch.where(brings_O, victim_O, filled.spare_O)
        # A pad leaves, which is no loss.
        brings = [limits.kinds[kind].brings for kind in limits.kind_of_owners]
        lost = any(gone and brought for gone, brought in zip(drops, brings, strict=True))
        drops = [gone or not brought for gone, brought in zip(drops, brings, strict=True)]
    return Replaced(maps=_maps(maps, filled, victim_O, drops_O, drops), drops_rows=lost)


def _fill(maps: Sequence[RaggedMap], new: NewRows, limits: OwnerLimits) -> _Filled:
    """Put every owner's new row into its spare slot, and add what the query gave to each row."""
    slot_counts_O = torch.cat([part.lengths_O for part in maps]).long() + 1
    spare_O = torch.cat([part.next_slots_O for part in maps]).long()
    starts_O = slot_counts_O.cumsum(0) - slot_counts_O
    owner_P = torch.repeat_interleave(slot_counts_O, output_size=new.received_P.shape[0])
    columns_P = torch.cat([part.columns_P for part in maps])
    tokens_P = torch.cat([part.tokens_P for part in maps])
    states_PX = torch.cat([part.states_PX for part in maps if part.states_PX is not None])
    at_O, row_O = starts_O + spare_O, limits.row_K[limits.kind_O]
    columns_P.index_copy_(0, at_O, new.columns_B[row_O])
    tokens_P.index_copy_(0, at_O, new.tokens_B[row_O])
    states_PX.index_fill_(0, at_O, 0.0)
    received_P, seen_P = new.received_P, new.seen_P
    if not limits.all_bring:
        brings_P = limits.brings_K[limits.kind_O].index_select(0, owner_P)
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


def _columns_of_kinds(new: NewRows, limits: OwnerLimits) -> tuple[Tensor, Tensor, Tensor]:
    """Return of every column ever fed, for each kind of owner: its token, whether that is special, or punctuation."""
    kinds_KF = new.kinds_BF.index_select(0, limits.row_K)
    return new.tokens_BF.index_select(0, limits.row_K), kinds_KF == SPECIAL_TOKEN, kinds_KF == PUNCTUATION_TOKEN


def _table_places(columns_P: Tensor, counts_O: Tensor, limits: OwnerLimits, columns: int) -> Tensor:
    """Return where a table [K, F] tells of each slot."""
    if len(limits.kinds) * columns >= 1 << 31:
        columns_P = columns_P.long()
    begins_O = (limits.kind_O * columns).to(columns_P.dtype)
    return begins_O.repeat_interleave(counts_O, output_size=columns_P.shape[0]) + columns_P


def _replace_stuck(
    place_O: Tensor, stuck: Sequence[int], filled: _Filled, scores_P: Tensor, classes_P: Tensor
) -> Tensor:
    """Return the victims where these owners, which have no open row, lose one of their last class."""
    owners_C = torch.tensor(stuck, device=place_O.device)
    counts_C = filled.slot_counts_O.index_select(0, owners_C)
    owner_L = torch.repeat_interleave(counts_C)
    before_C = filled.starts_O.index_select(0, owners_C) - (counts_C.cumsum(0) - counts_C)
    place_L = before_C.index_select(0, owner_L) + torch.arange(owner_L.shape[0], device=owner_L.device)
    classes_L = classes_P.index_select(0, place_L)
    tokens_L = filled.tokens_P.index_select(0, place_L)
    ranks_L = class_ranks(scores_P.index_select(0, place_L), classes_L, tokens_L)
    weakest_C = weakest_rows(classes_L, ranks_L, tokens_L, owner_L, len(stuck))
    return place_O.index_copy(0, owners_C, place_L.index_select(0, weakest_C))


def _maps(
    maps: Sequence[RaggedMap], filled: _Filled, victim_O: Tensor, drops_O: Tensor, drops: Sequence[bool]
) -> tuple[RaggedMap, ...]:
    """Return the open maps after the step, as windows on tensors of all layers."""
    old = [rows for part in maps for rows in part.lengths]
    rows = [n + 1 - gone for n, gone in zip(old, drops, strict=True)]
    flat: tuple[Tensor, ...] = (filled.columns_P, filled.tokens_P, filled.states_PX)
    if not all(drops):
        flat = tuple(_with_dead_slots(part, old, rows) for part in flat)
    spare_O = torch.where(drops_O, victim_O, filled.slot_counts_O).int()
    counts_O = (filled.slot_counts_O - drops_O.long()).int()
    per_layer = len(maps[0].lengths)
    by_layer = [tuple(rows[i : i + per_layer]) for i in range(0, len(rows), per_layer)]
    sizes = [sum(part) + per_layer for part in by_layer]
    columns, tokens, states = (torch.split(part, sizes) for part in flat)
    counts, spare = torch.split(counts_O, per_layer), torch.split(spare_O, per_layer)
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


def _with_dead_slots(flat: Tensor, old: Sequence[int], rows: Sequence[int]) -> Tensor:
    """Return what is said of slots, with a void one behind every owner that keeps all its rows; copied in long runs."""
    runs, run = [], 0
    for before, after in zip(old, rows, strict=True):
        run += before + 1
        if after > before:
            runs.append(run)
            run = 0
    *parts, rest = torch.split(flat, [*runs, run])
    return torch.cat([piece for part in parts for piece in (part, flat[:1])] + [rest])
