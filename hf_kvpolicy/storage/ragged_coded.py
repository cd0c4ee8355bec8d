"""Ragged K/V of one layer of which each owner's older rows are coded in blocks, and the newest held as they are.

An owner's slots are numbered as ever. Its first ones lie in blocks (`owner_blocks.py`), of a number of its own; the
others in the flat buffers, which `starts` is counted for: an owner's slot n behind its coded ones lies at `starts + n`.
So appending writes as it does where nothing is coded, and coding moves no slot. A row that is dropped leaves its block
as it is: the slots behind it count one less, and its place is slack.

Letters: N blocks of all owners, G rows of a block, C coded slots of all owners, K rows kept of all owners, O owners
(b * S + s), n rows of one owner, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from .codes import CHANNEL_AXIS, ROW_AXIS, CodedTensor
from .dense import growth_slots, stored_tensors
from .owner_blocks import OwnerBlocks
from .ragged import RaggedRows
from .ragged_map import RaggedMap, owners_of
from .ragged_view import RaggedView

__all__ = ["CodedRaggedRows", "code_owners", "with_owner_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedRaggedRows(RaggedRows):
    """Flat buffers of the slots that no block has, and the blocks of all owners."""

    blocks: OwnerBlocks

    @property
    def coded(self) -> tuple[int, ...]:
        """Coded slots of each owner: its first ones."""
        return self.blocks.slots

    @property
    def coded_slots(self) -> int:
        """Places of all blocks, in use or not."""
        return self.blocks.all_places

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, in use or not, with scales and zeros."""
        flat = sum(part.numel() * part.element_size() for part in (self.keys_ND, self.values_ND))
        return flat + self.blocks.slot_bytes

    def payload_bytes(self, live_O: Sequence[Tensor]) -> int:
        """Bytes of the live rows, with all it takes to read them; `live_O` says it of each owner's slots in use."""
        coded = torch.cat([live_n[:slots] for live_n, slots in zip(live_O, self.coded, strict=True)])
        plain = sum(int(live_n.sum()) for live_n in live_O) - int(coded.sum())
        return plain * self.row_bytes + self.blocks.payload_bytes(coded)

    def grown(self, used: Sequence[int], needed: Sequence[int]) -> RaggedRows:
        """Return a store with room for `needed` slots an owner; self when there is room."""
        if all(need <= room for need, room in zip(needed, self.capacities, strict=True)):
            return self
        larger = self.plain().grown(_less(used, self.coded), _less(needed, self.coded))
        return with_owner_blocks(larger, self.blocks)

    def owner(self, owner: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of an owner's first rows, [rows, D]: a copy, with its blocks decoded."""
        coded = self.coded[owner]
        begin, found = self.starts[owner] + coded, []
        for read, flat in zip(self.blocks.owner(owner), (self.keys_ND, self.values_ND), strict=True):
            found.append(torch.cat([read, flat[begin : begin + max(0, rows - coded)]])[:rows])
        return found[0], found[1]

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of all owners' slots, [N, D]: a copy, with blocks decoded."""
        return self._laid(self.capacities)

    def view(self, base: RaggedMap, behind: int) -> RaggedView:
        """Return what attention reads, a copy with blocks decoded: each owner's rows and `behind` ones after them."""
        lengths = tuple(length + behind for length in base.lengths)
        keys, values = self._laid(lengths)
        return RaggedView(
            keys_ND=keys,
            values_ND=values,
            heads=self.heads,
            starts=tuple(accumulate(lengths, initial=0))[:-1],
            lengths=lengths,
            base_lengths_O=base.lengths_O.to(self.device),
            tail_rows=behind,
        )

    def taken(self, slots_K: Tensor, lengths: Sequence[int]) -> RaggedRows:
        """Return a store of some slots of each owner, ascending but where none is coded: no block is made anew."""
        slots_K = slots_K.to(self.device)
        coded_O = torch.tensor(self.coded, device=self.device)
        owner_K = torch.repeat_interleave(torch.tensor(lengths, device=self.device), output_size=slots_K.shape[0])
        is_coded_K = slots_K < coded_O[owner_K]
        stays_C = torch.zeros(sum(self.coded), dtype=torch.bool, device=self.device)
        stays_C[((coded_O.cumsum(0) - coded_O)[owner_K] + slots_K)[is_coded_K]] = True
        kept = torch.bincount(owner_K[is_coded_K], minlength=len(lengths)).tolist()
        behind = self.plain().taken((slots_K - coded_O[owner_K])[~is_coded_K], _less(lengths, kept))
        return with_owner_blocks(behind, self.blocks.keeping(stays_C, tuple(kept))) if any(kept) else behind

    def without(self, slots: Sequence[int | None]) -> CodedRaggedRows:
        """Return the store without one coded slot of some owners: those behind it count one less; no row is copied."""
        stays_C = torch.ones(sum(self.coded), dtype=torch.bool)
        firsts = accumulate(self.coded, initial=0)
        stays_C[[first + slot for first, slot in zip(firsts, slots, strict=False) if slot is not None]] = False
        kept = tuple(coded - (slot is not None) for coded, slot in zip(self.coded, slots, strict=True))
        return with_owner_blocks(self.plain(), self.blocks.keeping(stays_C, kept))

    def batch(self, index: Sequence[int]) -> RaggedRows:
        """Return a store with its batch rows selected, repeated or reordered (always a copy, slack included)."""
        return with_owner_blocks(self.plain().batch(index), self.blocks.batch(owners_of(index, self.heads)))

    def of(self, tensors: Sequence[Tensor]) -> CodedRaggedRows:
        """Return the same rows over other tensors, in the order of `tensors()`."""
        keys, values, starts, *blocks = tensors
        return replace(self, keys_ND=keys, values_ND=values, starts_O=starts, blocks=self.blocks.of(blocks))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        return (self.keys_ND, self.values_ND, self.starts_O, *self.blocks.tensors())

    def plain(self) -> RaggedRows:
        """Return the flat buffers alone, an owner's first slot behind its coded ones as its slot 0."""
        with stored_tensors():
            coded = torch.tensor(self.coded, dtype=torch.int32, device=self.starts_O.device)
            starts_O = self.starts_O + coded
        return RaggedRows(
            keys_ND=self.keys_ND,
            values_ND=self.values_ND,
            starts_O=starts_O,
            starts=tuple(a + b for a, b in zip(self.starts, self.coded, strict=True)),
            capacities=tuple(_less(self.capacities, self.coded)),
            heads=self.heads,
        )

    def _laid(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return every owner's first slots, back to back."""
        found = []
        for read, flat in zip(self.blocks.decoded(), (self.keys_ND, self.values_ND), strict=True):
            done, parts = 0, []
            for length, coded, start in zip(lengths, self.coded, self.starts, strict=True):
                parts += [read[done : done + coded], flat[start + coded : start + length]]
                done += coded
            found.append(torch.cat(parts))
        return found[0], found[1]


def with_owner_blocks(plain: RaggedRows, blocks: OwnerBlocks) -> CodedRaggedRows:
    """Return a store whose owners have some blocks before what flat buffers hold of them."""
    with stored_tensors():
        shift = torch.tensor(blocks.slots, dtype=torch.int32, device=plain.starts_O.device)
        starts_O = plain.starts_O - shift
    return CodedRaggedRows(
        keys_ND=plain.keys_ND,
        values_ND=plain.values_ND,
        starts_O=starts_O,
        starts=tuple(_less(plain.starts, blocks.slots)),
        capacities=tuple(a + b for a, b in zip(plain.capacities, blocks.slots, strict=True)),
        heads=plain.heads,
        blocks=blocks,
    )


def code_owners(
    rows: RaggedRows, used: Sequence[int], live_O: Sequence[Tensor], due: Sequence[int], *, bits: int, block_rows: int
) -> RaggedRows:
    """Return a layer's store with each owner's oldest rows that are not coded in so many blocks more.

    Blocks none of whose rows is left are gone, and those that are half empty are repacked.

    Args:
        used: slots of each owner in use.
        live_O: which of them hold a row.
        due: blocks that each owner gets.
    """
    old = rows.blocks if isinstance(rows, CodedRaggedRows) else None
    coded = (0,) * len(used) if old is None else old.slots
    if not any(due) and (old is None or old.places_C is None):
        return rows
    plain = rows.plain() if isinstance(rows, CodedRaggedRows) else rows
    residual, taken = _less(used, coded), [count * block_rows for count in due]
    held = [plain.owner(owner, slots) for owner, slots in enumerate(residual)]
    live = torch.cat([own[done : done + n] for own, done, n in zip(live_O, coded, taken, strict=True)])
    live = live.to(rows.device).view(1, 1, sum(due), block_rows)
    parts = []
    for which, axis in enumerate((ROW_AXIS, CHANNEL_AXIS)):
        part = torch.cat([own[which][:n] for own, n in zip(held, taken, strict=True)])
        part = part.view(1, 1, sum(due), block_rows, part.shape[1])
        parts.append(CodedTensor.encode(part, live, bits=bits, axis=axis))
    blocks = OwnerBlocks(keys=parts[0], values=parts[1], counts=tuple(due), slots=tuple(taken))
    if old is not None:
        named = [own[: done + n] for own, done, n in zip(live_O, coded, taken, strict=True)]
        blocks = old.then(blocks, torch.cat(named))
    left = _less(residual, taken)
    smaller = RaggedRows.allocate(*held[0], [growth_slots(n) for n in left], rows.heads)
    for owner, own in enumerate(held):
        for into, kept in zip(smaller.owner(owner, left[owner]), own, strict=True):
            into.copy_(kept[taken[owner] :])
    return with_owner_blocks(smaller, blocks) if blocks.all_places else smaller


def _less(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(left, right, strict=True)]
