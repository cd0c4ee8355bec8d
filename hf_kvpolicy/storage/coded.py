"""K/V rows of one layer of which the older ones are coded in blocks, and the newest are held as they are.

A slot lies in one of two places. The full-precision buffers have the first `pinned` slots (keys that attention
re-rotates) and, without a gap, those behind the blocks: the *residual*. Between them, block n has the G slots from
`pinned + n * G` on, the same for all owners. Coding the residual's oldest slots therefore moves no slot; blocks are
never written, and a row that is dropped from one leaves a dead slot.

Letters: B batch rows, S stored heads, W slots in use, N blocks, G rows of a block, T new rows, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .codes import CHANNEL_AXIS, ROW_AXIS, CodedTensor, in_blocks
from .dense import DenseRows, growth_slots

__all__ = ["CodedRows", "code_due", "due_blocks", "relaid", "with_blocks"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedRows(DenseRows):
    """The K/V buffers of one layer and its blocks. `DenseRows` is the store of the slots that no block has."""

    key_blocks: CodedTensor
    value_blocks: CodedTensor
    pinned: int

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.key_blocks.block_rows

    @property
    def coded_slots(self) -> int:
        """Slots of all blocks, per stored head."""
        return self.key_blocks.blocks * self.block_rows

    @property
    def residual(self) -> int:
        """The first slot behind the blocks."""
        return self.pinned + self.coded_slots

    @property
    def capacity(self) -> int:
        """Slots per stored head."""
        return self.keys_BSCD.shape[2] + self.coded_slots

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, live or not, with scales and zeros."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    def payload_bytes(self, live_BSW: Tensor) -> int:
        """Bytes of the live rows, with all it takes to read them: scales and zeros of rows, and of blocks with any."""
        per_block = in_blocks(live_BSW[:, :, self.pinned : self.residual], self.block_rows).sum(-1)
        coded, blocks = int(per_block.sum()), int((per_block > 0).sum())
        plain = int(live_BSW.sum()) - coded
        parts = (self.key_blocks, self.value_blocks)
        return plain * self.row_bytes + sum(coded * part.row_bytes + blocks * part.block_bytes for part in parts)

    def grown(self, used: int, needed: int, *, limit: int | None = None) -> CodedRows:
        """Return a store with room for `needed` slots; the residual is as wide as it must be, whatever the limit."""
        if needed <= self.capacity:
            return self
        plain = DenseRows(keys_BSCD=self.keys_BSCD, values_BSCD=self.values_BSCD)
        larger = plain.grown(used - self.coded_slots, needed - self.coded_slots)
        return replace(self, keys_BSCD=larger.keys_BSCD, values_BSCD=larger.values_BSCD)

    def write(self, slot: int, keys_BSTD: Tensor, values_BSTD: Tensor) -> None:
        """Write rows into consecutive slots, pinned or behind the blocks."""
        rows, place = keys_BSTD.shape[2], self._place(slot)
        self.keys_BSCD.narrow(2, place, rows).copy_(keys_BSTD)
        self.values_BSCD.narrow(2, place, rows).copy_(values_BSTD)

    def write_at(self, slot_B: Tensor, keys_BS1D: Tensor, values_BS1D: Tensor) -> None:
        """Write one row per batch row, each into a slot of its own, pinned or behind the blocks."""
        DenseRows.write_at(
            self, torch.where(slot_B < self.pinned, slot_B, slot_B - self.coded_slots), keys_BS1D, values_BS1D
        )

    def view(self, width: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `width` slots, [B, S, width, D]: a copy, with blocks decoded."""
        keys = self._decoded(self.keys_BSCD, self.key_blocks, width)
        return keys, self._decoded(self.values_BSCD, self.value_blocks, width)

    def held(self, slot: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of consecutive slots behind the blocks, [B, S, rows, D]."""
        return DenseRows.held(self, self._place(slot), rows)

    def view_bytes(self, width: int) -> int:
        """Bytes of what `view` makes."""
        batch, heads = self.keys_BSCD.shape[:2]
        return batch * heads * width * self.row_bytes

    def of(self, tensors: Sequence[Tensor]) -> CodedRows:
        """Return the same rows over other tensors, in the order of `tensors()`."""
        return replace(
            self,
            keys_BSCD=tensors[0],
            values_BSCD=tensors[1],
            key_blocks=self.key_blocks.of(tensors[2:5]),
            value_blocks=self.value_blocks.of(tensors[5:8]),
            pinned_keys_BSPD=tensors[8] if len(tensors) > 8 else None,
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        pinned = () if self.pinned_keys_BSPD is None else (self.pinned_keys_BSPD,)
        return (*self._tensors(), *pinned)

    def _place(self, slot: int) -> int:
        assert slot < self.pinned or slot >= self.residual, "a block is never written"
        return slot if slot < self.pinned else slot - self.coded_slots

    def _decoded(self, plain_BSCD: Tensor, blocks: CodedTensor, width: int) -> Tensor:
        batch, heads, _, dim = plain_BSCD.shape
        rows = plain_BSCD.new_empty((batch, heads, width, dim))
        rows[:, :, : self.pinned] = plain_BSCD[:, :, : self.pinned]
        blocks.decode(in_blocks(rows[:, :, self.pinned : self.residual], self.block_rows))
        rows[:, :, self.residual :] = plain_BSCD[:, :, self.pinned : width - self.coded_slots]
        return rows

    def _tensors(self) -> tuple[Tensor, ...]:
        return (self.keys_BSCD, self.values_BSCD, *self.key_blocks.tensors(), *self.value_blocks.tensors())


def due_blocks(residual_rows: int, block_rows: int) -> int:
    """Return how many blocks of a residual are coded: the newest G rows or more are not, and fewer than 2 G."""
    return max(0, residual_rows // block_rows - 1)


def code_due(rows: DenseRows, width: int, live_BSW: Tensor, *, bits: int, block_rows: int, pinned: int) -> DenseRows:
    """Return a layer's store with the oldest rows of a full residual coded behind its blocks; no slot moves.

    Args:
        width: slots in use.
        live_BSW: which of them hold a row.
        pinned: first slots that are never coded.
    """
    blocks = due_blocks(width - pinned - rows.coded_slots, block_rows)
    if not blocks:
        return rows
    start = pinned + rows.coded_slots
    taken = blocks * block_rows
    live = in_blocks(live_BSW[:, :, start : start + taken], block_rows)
    live = live.to(rows.device).expand(-1, rows.keys_BSCD.shape[1], -1, -1)
    parts = [in_blocks(part, block_rows) for part in rows.held(start, taken)]
    keys = CodedTensor.encode(parts[0], live, bits=bits, axis=ROW_AXIS)
    values = CodedTensor.encode(parts[1], live, bits=bits, axis=CHANNEL_AXIS)
    if isinstance(rows, CodedRows):
        keys, values = rows.key_blocks.then(keys), rows.value_blocks.then(values)
    return relaid(rows, pinned, (keys, values), rows.held(start + taken, width - start - taken))


def relaid(
    rows: DenseRows, pinned: int, blocks: tuple[CodedTensor, CodedTensor] | None, residual: tuple[Tensor, Tensor]
) -> DenseRows:
    """Return a store of the same pinned slots, of blocks of keys and values (None: of none), and of residual rows."""
    held = residual[0].shape[2]
    room = growth_slots(held)
    if blocks is not None:
        # One row more, and the oldest are coded.
        room = max(held, 2 * blocks[0].block_rows)
    plain = DenseRows.allocate(*residual, pinned + room)
    for buffer, old, new in (
        (plain.keys_BSCD, rows.keys_BSCD, residual[0]),
        (plain.values_BSCD, rows.values_BSCD, residual[1]),
    ):
        buffer[:, :, :pinned] = old[:, :, :pinned]
        buffer[:, :, pinned : pinned + held] = new
    plain = replace(plain, pinned_keys_BSPD=rows.pinned_keys_BSPD)
    return plain if blocks is None else with_blocks(plain, blocks, pinned)


def with_blocks(rows: DenseRows, blocks: tuple[CodedTensor, CodedTensor], pinned: int) -> CodedRows:
    """Return a store with blocks of keys and values between its pinned slots and the others."""
    return CodedRows(
        keys_BSCD=rows.keys_BSCD,
        values_BSCD=rows.values_BSCD,
        pinned_keys_BSPD=rows.pinned_keys_BSPD,
        key_blocks=blocks[0],
        value_blocks=blocks[1],
        pinned=pinned,
    )
