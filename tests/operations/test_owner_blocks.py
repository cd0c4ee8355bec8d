"""Blocks of owners of unequal length: random deaths against a plain list of what every owner holds, in its order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from hf_kvpolicy.storage import RaggedRows
from hf_kvpolicy.storage.coded import due_blocks
from hf_kvpolicy.storage.ragged_coded import CodedRaggedRows, code_owners

HEADS, OWNERS, DIMS = 2, 4, (6, 5)
_UNTOUCHED = torch.zeros(1)


@dataclass
class Row:
    """What a row was, upper bounds of how far what is read may be off, and where it lies; -1 for no block."""

    keys: Tensor
    values: Tensor
    bounds: tuple[Tensor, Tensor] = (_UNTOUCHED, _UNTOUCHED)
    read: tuple[Tensor, Tensor] = (_UNTOUCHED, _UNTOUCHED)
    block: int = -1


class Owners:
    """A store into which rows come and of which rows die, and plain lists beside it."""

    def __init__(self, bits: int, block: int, budgets: tuple[int, ...], seed: int) -> None:
        self.bits, self.block, self.budgets = bits, block, budgets
        self.random = torch.Generator().manual_seed(seed)
        self.rows = RaggedRows.allocate(*(torch.zeros(0, dim) for dim in DIMS), [1] * OWNERS, HEADS)
        self.held: list[list[Row]] = [[] for _ in range(OWNERS)]
        self.repacked = self.freed = 0

    @property
    def lengths(self) -> list[int]:
        return [len(own) for own in self.held]

    @property
    def coded(self) -> tuple[int, ...]:
        return self.rows.coded if isinstance(self.rows, CodedRaggedRows) else (0,) * OWNERS

    def come(self) -> None:
        keys, values = (torch.randn(OWNERS // HEADS, HEADS, 1, dim, generator=self.random) for dim in DIMS)
        self.rows = self.rows.grown(self.lengths, [n + 1 for n in self.lengths])
        self.rows.write(torch.tensor(self.lengths, dtype=torch.int32), 0, keys, values)
        for owner, own in enumerate(self.held):
            own.append(Row(keys.flatten(0, 2)[owner], values.flatten(0, 2)[owner]))

    def die_in_blocks(self) -> None:
        """Drop one coded row of every owner that is over its budget, as a decode step does."""
        slots = [
            int(torch.randint(coded, (1,), generator=self.random)) if coded and n > budget else None
            for n, coded, budget in zip(self.lengths, self.coded, self.budgets, strict=True)
        ]
        if isinstance(self.rows, CodedRaggedRows) and any(slot is not None for slot in slots):
            self.rows = self.rows.without(slots)
        for own, slot in zip(self.held, slots, strict=True):
            if slot is not None:
                del own[slot]

    def die_anywhere(self, most: int) -> None:
        """Drop some rows of every owner, coded or not, as a selection does."""
        kept = []
        for own in self.held:
            lost = int(torch.randint(min(most, len(own)) + 1, (1,), generator=self.random))
            stays = torch.randperm(len(own), generator=self.random)[lost:].sort().values
            own[:] = [own[slot] for slot in stays]
            kept.append(stays)
        self.rows = self.rows.taken(torch.cat(kept), self.lengths)

    def code(self) -> None:
        due = [due_blocks(n - coded, self.block) for n, coded in zip(self.lengths, self.coded, strict=True)]
        live = [torch.ones(n, dtype=torch.bool) for n in self.lengths]
        before = sum(self.rows.blocks.counts) if isinstance(self.rows, CodedRaggedRows) else 0
        self.rows = code_owners(self.rows, self.lengths, live, due, bits=self.bits, block_rows=self.block)
        if isinstance(self.rows, CodedRaggedRows):
            self.freed += before + sum(due) > sum(self.rows.blocks.counts)
            self._note(self.rows)

    def _note(self, rows: CodedRaggedRows) -> None:
        """Follow every row to its block: what is read of it changes only where it is coded, and only when it must."""
        blocks, first = rows.blocks, 0
        places = blocks.places().split(list(blocks.slots))
        for owner, own in enumerate(self.held):
            counts = [0] * blocks.counts[owner]
            left = [row.block for row in own]
            read = rows.owner(owner, len(own))
            for slot, (row, place) in enumerate(zip(own, places[owner].tolist(), strict=False)):
                at, within = divmod(place, self.block)
                counts[at - first] += 1
                now = read[0][slot], read[1][slot]
                if row.block < 0 or not all(map(torch.equal, now, row.read)):
                    if row.block >= 0:
                        self.repacked += 1
                        assert left.count(row.block) <= self.block // 2, "a block over half full is not coded again"
                    steps = blocks.keys.scales[0, 0, at, 0] / 2, blocks.values.scales[0, 0, at, within] / 2
                    row.bounds = tuple(old + step + 1e-5 for old, step in zip(row.bounds, steps, strict=True))
                    row.read = now
            for row, place in zip(own, places[owner].tolist(), strict=False):
                row.block = place // self.block
            first += blocks.counts[owner]
            assert 0 not in counts, "a block without a row is gone"
            halves = sum(count <= self.block // 2 for count in counts)
            filled = -(-sum(counts) // self.block)
            assert halves <= 1 or len(counts) <= filled + 1, "blocks that fit together are one where there are many"

    def check(self) -> None:
        for owner, own in enumerate(self.held):
            read = self.rows.owner(owner, len(own))
            for slot, row in enumerate(own):
                for part, made, bound in zip(read, (row.keys, row.values), row.bounds, strict=True):
                    assert ((part[slot] - made).abs() <= bound).all(), "every row lies in its order"
        rows = self.rows
        if not isinstance(rows, CodedRaggedRows):
            return
        assert not rows.blocks.faults()
        measured = sum(tensor.untyped_storage().nbytes() for tensor in rows.tensors())
        assert rows.slot_bytes == measured - 4 * OWNERS
        live = [torch.ones(n, dtype=torch.bool) for n in self.lengths]
        parts = (rows.blocks.keys, rows.blocks.values)
        named = {int(place) // self.block for place in rows.blocks.places()}
        bytes_of_rows = sum(part.row_bytes for part in parts) + 4 * (rows.blocks.places_C is not None)
        expected = sum(rows.coded) * bytes_of_rows + len(named) * parts[0].block_bytes
        assert rows.payload_bytes(live) == expected + (sum(self.lengths) - sum(rows.coded)) * rows.row_bytes


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("block", "budgets"), [(4, (20, 7, 13, 30)), (5, (17, 5, 24, 11)), (1, (5, 3, 8, 2))])
def test_random_deaths(block: int, budgets: tuple[int, ...], bits: int) -> None:
    owners = Owners(bits, block, budgets, seed=block)
    for step in range(12 * block + 60):
        owners.come()
        owners.die_in_blocks()
        if step % 9 == 8:
            owners.die_anywhere(most=block)
        if any(n - coded >= 3 * block for n, coded in zip(owners.lengths, owners.coded, strict=True)):
            owners.code()
            owners.check()
    owners.check()
    assert owners.freed, "some blocks were left out"
    assert owners.repacked or block == 1, "some blocks were repacked"


def test_other_batch_rows_and_copies_read_the_same() -> None:
    owners = Owners(8, 4, (20, 7, 13, 30), seed=3)
    for _ in range(60):
        owners.come()
        owners.die_in_blocks()
        if max(n - coded for n, coded in zip(owners.lengths, owners.coded, strict=True)) >= 12:
            owners.code()
    rows = owners.rows
    assert isinstance(rows, CodedRaggedRows)
    assert rows.blocks.places_C is not None
    for other, index in ((rows.copied(), (0, 1)), (rows.batch([1, 0, 1]), (1, 0, 1)), (rows.batch([1]), (1,))):
        assert isinstance(other, CodedRaggedRows)
        assert not other.blocks.faults()
        for row, source in enumerate(index):
            for head in range(HEADS):
                n = owners.lengths[source * HEADS + head]
                pairs = zip(other.owner(row * HEADS + head, n), rows.owner(source * HEADS + head, n), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)


def test_blocks_of_another_owner_are_a_fault() -> None:
    owners = Owners(8, 4, (20, 20, 20, 20), seed=4)
    for _ in range(24):
        owners.come()
    owners.code()
    assert isinstance(owners.rows, CodedRaggedRows)
    blocks = owners.rows.blocks
    swapped = replace(blocks, places_C=blocks.places().flip(0).int())
    assert swapped.faults()
    assert replace(blocks, counts=(1, *blocks.counts[1:])).faults()
