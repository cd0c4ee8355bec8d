"""Blocks of coded rows of owners of unequal length: which rows lie in them, and which blocks are freed or repacked.

Owner after owner has a number of blocks of its own in one tensor. A block is never written. A row that is dropped from
one is no longer named (`places_C`); what was its place is slack until the block is left out, because none of its rows
is named any more, or repacked: where an owner has over one block more than its rows fill, some that are at most half
full become one again, whose rows are coded once more (`coded_blocks.py`).

Letters: N blocks of all owners, G rows of a block, C coded slots of all owners, O owners (b * S + s), E blocks that are
made of others, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from .coded_blocks import joined_blocks, roomy_blocks
from .codes import CodedTensor

__all__ = ["OwnerBlocks"]

_PLACE_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnerBlocks:
    """The blocks [1, 1, N, G, ...] of one layer, and each owner's slots that lie in them."""

    keys: CodedTensor
    values: CodedTensor
    counts: tuple[int, ...]  # blocks of each owner
    slots: tuple[int, ...]  # slots of each owner that lie in its blocks
    # int32, where every slot lies among the N * G places; None where that is in order, and no place is left over.
    places_C: Tensor | None = None

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.keys.block_rows

    @property
    def all_places(self) -> int:
        """Places of all blocks."""
        return self.keys.blocks * self.block_rows

    @property
    def slot_bytes(self) -> int:
        """Bytes of all places, of scales and zeros, and of what says which row lies where."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())

    def payload_bytes(self, live_C: Tensor) -> int:
        """Bytes of the slots that hold a row, with all it takes to read them."""
        at = self.places()[live_C.to(self.device)]
        rows, blocks = at.shape[0], int(torch.bincount(at // self.block_rows).count_nonzero())
        own = 0 if self.places_C is None else rows * _PLACE_BYTES
        return own + sum(rows * part.row_bytes + blocks * part.block_bytes for part in (self.keys, self.values))

    @property
    def device(self) -> torch.device:
        """Where the blocks lie."""
        return self.keys.codes_BSNGX.device

    def places(self) -> Tensor:
        """Return where every slot lies, int64 [C]."""
        if self.places_C is None:
            return torch.arange(self.all_places, device=self.device)
        return self.places_C.long()

    def decoded(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of all slots, owner after owner, [C, D]."""
        found = [part.decoded().view(-1, part.dim) for part in (self.keys, self.values)]
        if self.places_C is not None:
            found = [part.index_select(0, self.places_C) for part in found]
        return found[0], found[1]

    def owner(self, owner: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one owner's slots, [slots, D]."""
        first, own = sum(self.counts[:owner]), slice(sum(self.slots[:owner]), sum(self.slots[: owner + 1]))
        found = []
        for part in (self.keys, self.values):
            blocks = part.of([tensor[:, :, first : first + self.counts[owner]] for tensor in part.tensors()])
            read = blocks.decoded().view(-1, part.dim)
            found.append(read if self.places_C is None else read[self.places_C[own] - first * self.block_rows])
        return found[0], found[1]

    def keeping(self, stays_C: Tensor, slots: tuple[int, ...]) -> OwnerBlocks:
        """Return the same blocks without some slots, of which each owner then has so many."""
        if self.places_C is None and sum(slots) == self.all_places:
            return self
        return replace(self, slots=slots, places_C=self.places()[stays_C.to(self.device)].int())

    def batch(self, owners: Sequence[int]) -> OwnerBlocks:
        """Return the blocks of some owners, in this order (always a copy)."""
        firsts, ends = tuple(accumulate(self.counts, initial=0)), tuple(accumulate(self.slots, initial=0))
        counts = tuple(self.counts[o] for o in owners)
        chosen = self._blocks([block for o in owners for block in range(firsts[o], firsts[o + 1])])
        places = None
        if self.places_C is not None:
            pairs = zip(owners, _ranges(counts, 0), strict=True)
            parts = [
                self.places_C[ends[o] : ends[o + 1]] + (new.start - firsts[o]) * self.block_rows for o, new in pairs
            ]
            places = torch.cat([self.places_C[:0], *parts])
        return replace(chosen, counts=counts, slots=tuple(self.slots[o] for o in owners), places_C=places)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        places = () if self.places_C is None else (self.places_C,)
        return (*self.keys.tensors(), *self.values.tensors(), *places)

    def then(self, new: OwnerBlocks, live_C: Tensor) -> OwnerBlocks:
        """Return these blocks with each owner's new ones behind its own, where the rows of both leave any.

        Args:
            new: blocks of the same owners, all of whose places are slots.
            live_C: which of the slots of both, owner after owner, hold a row.
        """
        rows, size = self.block_rows, self.keys.blocks
        old_places, new_places = self.places(), new.places() + size * rows
        pieces = zip(torch.split(old_places, list(self.slots)), torch.split(new_places, list(new.slots)), strict=True)
        both = replace(
            self,
            keys=self.keys.then(new.keys),
            values=self.values.then(new.values),
            slots=tuple(a + b for a, b in zip(self.slots, new.slots, strict=True)),
            places_C=torch.cat(list(chain(*pieces))),
        )
        own = zip(_ranges(self.counts, 0), _ranges(new.counts, size), strict=True)
        return both._without_room([[*old, *added] for old, added in own], live_C, self.places_C is not None)

    def faults(self) -> list[tuple[int, str]]:
        """Return what is wrong with the blocks of which owner."""
        if sum(self.counts) != self.keys.blocks or self.keys.blocks != self.values.blocks:
            return [(0, "or another has other blocks than owners are said to have")]
        all_places, owned, found = self.places(), _ranges(self.counts, 0), []
        if sum(self.slots) != all_places.shape[0]:
            return [(0, "or another has other slots in blocks than owners are said to have")]
        for owner, (own, part) in enumerate(zip(owned, torch.split(all_places, list(self.slots)), strict=True)):
            places = part.tolist()
            inside = range(own.start * self.block_rows, own.stop * self.block_rows)
            if not all(place in inside for place in places) or len(set(places)) < len(places):
                found.append((owner, "has rows in blocks of another, or two in one place"))
        return found

    def _without_room(self, blocks_O: list[list[int]], live_C: Tensor, has_room: bool) -> OwnerBlocks:
        """Return the blocks owner after owner, without those that no slot names, and with some repacked.

        Args:
            blocks_O: the blocks of each owner.
            has_room: whether a place of any block is left over.
        """
        places, made = self.places(), self
        if has_room:
            named = torch.bincount(places // self.block_rows, minlength=self.keys.blocks).tolist()
            live_O = [{block: named[block] for block in own if named[block]} for own in blocks_O]
            blocks_O = [list(own) for own in live_O]
            bins_O = [self._joined(own) for own in live_O]
            joins = list(chain(*bins_O))
            if joins:
                made, places = self._repacked(joins, live_C)
                gone, first = set(chain(*joins)), self.keys.blocks
                added_O = _ranges([len(bins) for bins in bins_O], first)
                blocks_O = [
                    [*(block for block in own if block not in gone), *added]
                    for own, added in zip(blocks_O, added_O, strict=True)
                ]
        order = list(chain(*blocks_O))
        to_N = torch.zeros(made.keys.blocks, dtype=torch.int64)
        to_N[torch.tensor(order, dtype=torch.int64)] = torch.arange(len(order))
        rows = self.block_rows
        places = to_N.to(places.device)[places // rows] * rows + places % rows
        is_plain = not has_room or torch.equal(places, torch.arange(len(order) * rows, device=places.device))
        counts = tuple(len(own) for own in blocks_O)
        return replace(made._blocks(order), counts=counts, places_C=None if is_plain else places.int())

    def _joined(self, live: dict[int, int]) -> list[list[int]]:
        """Return which blocks of an owner become one, of the live rows in each."""
        return joined_blocks(live, self.block_rows, roomy_blocks(sum(live.values()), self.block_rows))

    def _repacked(self, joins: list[list[int]], live_C: Tensor) -> tuple[OwnerBlocks, Tensor]:
        """Return these blocks and behind them one of the rows of each group of others; and where slots lie then."""
        rows, places, device = self.block_rows, self.places(), self.device
        join_N = torch.full((self.keys.blocks,), -1)
        at_N = torch.zeros(self.keys.blocks, dtype=torch.int64)
        sources = list(chain(*joins))
        at_N[sources] = torch.arange(len(sources))
        for number, group in enumerate(joins):
            join_N[group] = number
        join_C = join_N.to(device)[places // rows]
        # The slots that move, group by group, in their order within each.
        moves = (join_C >= 0).nonzero()[:, 0]
        moves = moves[join_C[moves].argsort(stable=True)]
        sizes = torch.bincount(join_C[moves], minlength=len(joins))
        within = torch.arange(moves.shape[0], device=device) - (sizes.cumsum(0) - sizes)[join_C[moves]]
        target = join_C[moves] * rows + within
        live = torch.zeros(len(joins) * rows, dtype=torch.bool, device=device)
        live[target] = live_C.to(device)[moves]
        source = at_N.to(device)[places[moves] // rows] * rows + places[moves] % rows
        parts = []
        for part in (self.keys, self.values):
            read = part.of([t.index_select(2, torch.tensor(sources, device=device)) for t in part.tensors()]).decoded()
            packed = read.new_zeros((len(joins) * rows, part.dim))
            packed[target] = read.view(-1, part.dim)[source]
            blocks = packed.view(1, 1, -1, rows, part.dim), live.view(1, 1, -1, rows)
            parts.append(part.then(CodedTensor.encode(*blocks, bits=part.bits, axis=part.axis)))
        moved = places.index_copy(0, moves, self.keys.blocks * rows + target)
        return replace(self, keys=parts[0], values=parts[1]), moved

    def _blocks(self, order: list[int]) -> OwnerBlocks:
        """Return blocks in an order, whatever slots say."""
        at = torch.tensor(order, dtype=torch.int64, device=self.device)
        keys, values = (part.of([t.index_select(2, at) for t in part.tensors()]) for part in (self.keys, self.values))
        return replace(self, keys=keys, values=values)

    def of(self, tensors: Sequence[Tensor]) -> OwnerBlocks:
        """Return the same blocks over other tensors, in the order of `tensors()`."""
        keys, values = self.keys.of(tensors[:3]), self.values.of(tensors[3:6])
        return replace(self, keys=keys, values=values, places_C=tensors[6] if len(tensors) > 6 else None)


def _ranges(counts: Sequence[int], first: int) -> list[range]:
    """Return so many numbers for each owner, in order from the first one on."""
    return [range(begin, end) for begin, end in pairwise(accumulate(counts, initial=first))]
