"""Ragged K/V of one layer of which each owner's older rows are coded in blocks, and the newest held as they are.

An owner's slots are numbered as ever. Its first ones lie in blocks, of a number of its own, owner after owner in one
tensor; the others in the flat buffers, which `starts` is counted for: an owner's slot n behind its blocks lies at
`starts + n`. So appending writes as it does where nothing is coded, and coding moves no slot.

Letters: N blocks of all owners, G rows of a block, O owners (b * S + s), n rows of one owner, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from .coded import due_blocks
from .codes import CHANNEL_AXIS, ROW_AXIS, CodedTensor
from .dense import growth_slots, stored_tensors
from .ragged import RaggedRows
from .ragged_map import RaggedMap, owners_of
from .ragged_view import RaggedView

__all__ = ["CodedRaggedRows", "code_owners", "with_owner_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedRaggedRows(RaggedRows):
    """Flat buffers of the slots that no block has, and the blocks [1, 1, N, G, ...] of all owners."""

    key_blocks: CodedTensor
    value_blocks: CodedTensor
    blocks: tuple[int, ...]  # of each owner

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.key_blocks.block_rows

    @property
    def coded(self) -> tuple[int, ...]:
        """Coded slots of each owner: its first ones."""
        return tuple(blocks * self.block_rows for blocks in self.blocks)

    @property
    def coded_slots(self) -> int:
        """Coded slots of all owners."""
        return sum(self.coded)

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, in use or not, with scales and zeros."""
        parts = (self.keys_ND, self.values_ND, *self.key_blocks.tensors(), *self.value_blocks.tensors())
        return sum(part.numel() * part.element_size() for part in parts)

    def payload_bytes(self, live_O: Sequence[Tensor]) -> int:
        """Bytes of the live rows, with all it takes to read them; `live_O` says it of each owner's slots in use."""
        total = 0
        for live_n, coded in zip(live_O, self.coded, strict=True):
            blocks_NG = live_n[:coded].view(-1, self.block_rows)
            rows, whole = int(blocks_NG.sum()), int(blocks_NG.any(1).sum())
            total += int(live_n[coded:].sum()) * self.row_bytes
            total += sum(
                rows * part.row_bytes + whole * part.block_bytes for part in (self.key_blocks, self.value_blocks)
            )
        return total

    def grown(self, used: Sequence[int], needed: Sequence[int]) -> RaggedRows:
        """Return a store with room for `needed` slots an owner; self when there is room."""
        if all(need <= room for need, room in zip(needed, self.capacities, strict=True)):
            return self
        plain = self.plain()
        larger = plain.grown(_less(used, self.coded), _less(needed, self.coded))
        return with_owner_blocks(larger, (self.key_blocks, self.value_blocks), self.blocks)

    def owner(self, owner: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of an owner's first rows, [rows, D]: a copy, with its blocks decoded."""
        first, coded = sum(self.blocks[:owner]), self.coded[owner]
        begin, found = self.starts[owner] + coded, []
        for blocks, flat in ((self.key_blocks, self.keys_ND), (self.value_blocks, self.values_ND)):
            own = blocks.of([part[:, :, first : first + self.blocks[owner]] for part in blocks.tensors()])
            read = own.decoded().view(-1, blocks.dim)
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

    def batch(self, index: Sequence[int]) -> RaggedRows:
        """Return a store with its batch rows selected, repeated or reordered (always a copy, slack included)."""
        owners = owners_of(index, self.heads)
        firsts = tuple(accumulate(self.blocks, initial=0))
        chosen = [block for o in owners for block in range(firsts[o], firsts[o + 1])]
        at = torch.tensor(chosen, dtype=torch.int64, device=self.device)
        keys, values = (
            part.of([tensor.index_select(2, at) for tensor in part.tensors()])
            for part in (self.key_blocks, self.value_blocks)
        )
        return with_owner_blocks(self.plain().batch(index), (keys, values), tuple(self.blocks[o] for o in owners))

    def to(self, device: torch.device) -> RaggedRows:
        """Return the store on another device; self when it lies there."""
        if device == self.device:
            return self
        keys, values, starts, *parts = (tensor.to(device) for tensor in self.tensors())
        return replace(
            self,
            keys_ND=keys,
            values_ND=values,
            starts_O=starts,
            key_blocks=self.key_blocks.of(parts[:3]),
            value_blocks=self.value_blocks.of(parts[3:]),
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        parts = (*self.key_blocks.tensors(), *self.value_blocks.tensors())
        return (self.keys_ND, self.values_ND, self.starts_O, *parts)

    def plain(self) -> RaggedRows:
        """Return the flat buffers alone, an owner's first slot behind its blocks as its slot 0."""
        coded = torch.tensor(self.coded, dtype=torch.int32, device=self.starts_O.device)
        return RaggedRows(
            keys_ND=self.keys_ND,
            values_ND=self.values_ND,
            starts_O=self.starts_O + coded,
            starts=tuple(a + b for a, b in zip(self.starts, self.coded, strict=True)),
            capacities=tuple(_less(self.capacities, self.coded)),
            heads=self.heads,
        )

    def _laid(self, lengths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return every owner's first slots, back to back."""
        found = []
        for blocks, flat in ((self.key_blocks, self.keys_ND), (self.value_blocks, self.values_ND)):
            read, done, parts = blocks.decoded().view(-1, blocks.dim), 0, []
            for length, coded, start in zip(lengths, self.coded, self.starts, strict=True):
                parts += [read[done : done + coded], flat[start + coded : start + length]]
                done += coded
            found.append(torch.cat(parts))
        return found[0], found[1]


def with_owner_blocks(
    plain: RaggedRows, blocks: tuple[CodedTensor, CodedTensor], counts: tuple[int, ...]
) -> CodedRaggedRows:
    """Return a store whose owners have some blocks before what flat buffers hold of them."""
    coded = [count * blocks[0].block_rows for count in counts]
    with stored_tensors():
        shift = torch.tensor(coded, dtype=torch.int32, device=plain.starts_O.device)
        starts_O = plain.starts_O - shift
    return CodedRaggedRows(
        keys_ND=plain.keys_ND,
        values_ND=plain.values_ND,
        starts_O=starts_O,
        starts=tuple(_less(plain.starts, coded)),
        capacities=tuple(a + b for a, b in zip(plain.capacities, coded, strict=True)),
        heads=plain.heads,
        key_blocks=blocks[0],
        value_blocks=blocks[1],
        blocks=counts,
    )


def code_owners(
    rows: RaggedRows, used: Sequence[int], live_O: Sequence[Tensor], *, bits: int, block_rows: int
) -> CodedRaggedRows:
    """Return a layer's store with each owner's oldest rows coded that are due, behind its blocks.

    Args:
        used: slots of each owner in use.
        live_O: which of them hold a row.
    """
    old = rows if isinstance(rows, CodedRaggedRows) else None
    coded, before = ((0,) * len(used),) * 2 if old is None else (old.coded, old.blocks)
    residual = _less(used, coded)
    counts = [due_blocks(slots, block_rows) for slots in residual]
    taken = [count * block_rows for count in counts]
    plain = rows if old is None else old.plain()
    held = [plain.owner(owner, slots) for owner, slots in enumerate(residual)]
    live = torch.cat([own[done : done + n] for own, done, n in zip(live_O, coded, taken, strict=True)])
    live = live.to(rows.device).view(1, 1, -1, block_rows)
    blocks = []
    for which, axis in enumerate((ROW_AXIS, CHANNEL_AXIS)):
        part = torch.cat([own[which][:n] for own, n in zip(held, taken, strict=True)])
        new = CodedTensor.encode(part.view(1, 1, -1, block_rows, part.shape[1]), live, bits=bits, axis=axis)
        older = None if old is None else (old.key_blocks, old.value_blocks)[which]
        blocks.append(new if older is None else _interleaved(older, new, before, counts))
    left = _less(residual, taken)
    smaller = RaggedRows.allocate(*held[0], [growth_slots(n) for n in left], rows.heads)
    for owner, own in enumerate(held):
        for into, part in zip(smaller.owner(owner, left[owner]), own, strict=True):
            into.copy_(part[taken[owner] :])
    total = tuple(a + b for a, b in zip(before, counts, strict=True))
    return with_owner_blocks(smaller, (blocks[0], blocks[1]), total)


def _interleaved(old: CodedTensor, new: CodedTensor, before: Sequence[int], counts: Sequence[int]) -> CodedTensor:
    """Return each owner's old blocks followed by its new ones."""
    order, first_old, first_new = [], 0, sum(before)
    for own, more in zip(before, counts, strict=True):
        order += [*range(first_old, first_old + own), *range(first_new, first_new + more)]
        first_old, first_new = first_old + own, first_new + more
    at = torch.tensor(order, dtype=torch.int64, device=old.codes_BSNGX.device)
    both = old.then(new)
    return both.of([part.index_select(2, at) for part in both.tensors()])


def _less(left: Sequence[int], right: Sequence[int]) -> list[int]:
    return [a - b for a, b in zip(left, right, strict=True)]
