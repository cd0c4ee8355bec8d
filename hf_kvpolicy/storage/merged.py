"""Rows of two layers in one store: shared rows, a magnitude for each layer, and the exceptions as they were.

One `MergedPair` serves both layers; its slots are those of their maps. Exceptions are a log of live rows in ascending
order of slot and owner (batch row * H + head): appending writes behind the last one, taking columns back shortens it,
and a row that dies leaves it. As everywhere, a published slot or entry is never written again.

Behind the merged slots may lie rows of both layers as they were: those that wait for acceptance, or for the end of a
prompt that is held.

Letters: B batch rows, H KV heads, M map heads (H or 1), C capacity in slots, T new rows, W slots in use, K slots taken,
D head dimension, O owners (B * H), E entries of the log; an axis of size 2 is (lower, deeper layer).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .dense import DenseRows, growth_slots, stored_tensors
from .gather import gather_rows

__all__ = ["MergedPair", "MergedTensor"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedTensor:
    """Keys, or values, of a pair of layers. The object is immutable; slots and entries nobody publishes may be written.

    Entry i of the log is the row at slot `index_E[i] // O` of owner `index_E[i] % O`.
    """

    shared_BHCD: Tensor
    magnitudes_2BHC: Tensor  # fp32
    thresholds_BH: Tensor  # fp32; NaN until a batch row's prompt has fixed it
    index_E: Tensor  # int32
    rows_2ED: Tensor
    # Entries in use.
    exceptions: int

    @classmethod
    def allocate(cls, like_BHTD: Tensor, capacity: int) -> MergedTensor:
        """Return a store of no rows for rows shaped like these."""
        batch, heads, _, dim = like_BHTD.shape
        dtype, device = like_BHTD.dtype, like_BHTD.device
        with stored_tensors():
            return cls(
                shared_BHCD=torch.empty((batch, heads, capacity, dim), dtype=dtype, device=device),
                magnitudes_2BHC=torch.empty((2, batch, heads, capacity), dtype=torch.float32, device=device),
                thresholds_BH=torch.full((batch, heads), torch.nan, dtype=torch.float32, device=device),
                index_E=torch.empty(0, dtype=torch.int32, device=device),
                rows_2ED=torch.empty((2, 0, dim), dtype=dtype, device=device),
                exceptions=0,
            )

    @property
    def owners(self) -> int:
        """Batch rows times KV heads."""
        return self.shared_BHCD.shape[0] * self.shared_BHCD.shape[1]

    @property
    def capacity(self) -> int:
        """Slots per KV head."""
        return self.shared_BHCD.shape[2]

    @property
    def vector_bytes(self) -> int:
        """Bytes of one row of one layer."""
        return self.shared_BHCD.shape[3] * self.shared_BHCD.element_size()

    def payload_bytes(self, live_rows: int) -> int:
        """Bytes of so many rows (over all owners): shared rows, magnitudes, exceptions and their indices."""
        entry_bytes = 2 * self.vector_bytes + self.index_E.element_size()
        return live_rows * (self.vector_bytes + 2 * 4) + self.exceptions * entry_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots and entries, in use or not."""
        entry_bytes = 2 * self.vector_bytes + self.index_E.element_size()
        return self.owners * self.capacity * (self.vector_bytes + 2 * 4) + self.index_E.shape[0] * entry_bytes

    def grown(self, used: int, needed: int, *, limit: int | None = None) -> MergedTensor:
        """Return the store with room for `needed` slots and its first `used` slots copied; self when there is room.

        `limit` is the most slots there will ever be; slack beyond it would be waste.
        """
        if needed <= self.capacity:
            return self
        slots = growth_slots(needed)
        slots = slots if limit is None else max(needed, min(slots, limit))
        larger = MergedTensor.allocate(self.shared_BHCD, slots)
        larger.write(0, self.shared_BHCD[:, :, :used], self.magnitudes_2BHC[..., :used])
        return replace(self, shared_BHCD=larger.shared_BHCD, magnitudes_2BHC=larger.magnitudes_2BHC)

    def write(self, slot: int, shared_BHTD: Tensor, magnitudes_2BHT: Tensor) -> None:
        """Write merged rows into consecutive slots."""
        rows = shared_BHTD.shape[2]
        self.shared_BHCD.narrow(2, slot, rows).copy_(shared_BHTD)
        self.magnitudes_2BHC.narrow(3, slot, rows).copy_(magnitudes_2BHT)

    def write_at(self, slot_BM: Tensor, shared_BH1D: Tensor, magnitudes_2BH1: Tensor) -> None:
        """Write one merged row per owner, each into a slot of its own."""
        slot_BH11 = slot_BM.expand(shared_BH1D.shape[:2])[:, :, None, None]
        self.shared_BHCD.scatter_(2, slot_BH11.expand(shared_BH1D.shape), shared_BH1D)
        self.magnitudes_2BHC.scatter_(3, slot_BH11[..., 0].expand(magnitudes_2BH1.shape), magnitudes_2BH1)

    def note(self, used: int, apart_BHT: Tensor, rows_2BHTD: Sequence[Tensor]) -> MergedTensor:
        """Return the store with those of the rows behind `used` slots that are kept as they were."""
        place = apart_BHT.permute(2, 0, 1).reshape(-1).nonzero()[:, 0]
        total = self.exceptions + place.shape[0]
        if total == self.exceptions:
            return self
        grown = self._with_entries(growth_slots(total)) if total > self.index_E.shape[0] else self
        new = slice(self.exceptions, total)
        grown.index_E[new] = place + used * self.owners
        for layer, rows_BHTD in enumerate(rows_2BHTD):
            owner, heads = place % self.owners, rows_BHTD.shape[1]
            grown.rows_2ED[layer, new] = rows_BHTD[owner // heads, owner % heads, place // self.owners]
        return replace(grown, exceptions=total)

    def note_at(self, slot_BM: Tensor, apart_BH1: Tensor, rows_2BH1D: Sequence[Tensor]) -> MergedTensor:
        """As `note`, of one row per owner at a slot that had none; entries are laid anew in their order."""
        owner = apart_BH1.reshape(-1).nonzero()[:, 0]
        if not owner.shape[0]:
            return self
        slot = slot_BM.expand(apart_BH1.shape[:2]).reshape(-1)[owner]
        index, order = torch.cat([self.index_E[: self.exceptions], (slot * self.owners + owner).int()]).sort()
        new = torch.stack([rows.flatten(0, 1)[owner, 0] for rows in rows_2BH1D])
        rows_2ED = torch.cat([self.rows_2ED[:, : self.exceptions], new], dim=1)[:, order]
        return replace(self, index_E=index, rows_2ED=rows_2ED, exceptions=index.shape[0])

    def living(self, live_BMW: Tensor) -> MergedTensor:
        """Return the store without the entries of rows that are dead; buffers are shared where none is."""
        owner, slot = self.entries()
        heads = self.shared_BHCD.shape[1]
        stays = live_BMW.to(slot.device).expand(-1, heads, -1)[owner // heads, owner % heads, slot]
        kept = stays.nonzero()[:, 0]
        if kept.shape[0] == self.exceptions:
            return self
        return replace(self, index_E=self.index_E[kept], rows_2ED=self.rows_2ED[:, kept], exceptions=kept.shape[0])

    def taken(self, index_BMK: Tensor, capacity: int) -> tuple[MergedTensor, Tensor]:
        """Return a store of these slots, bit for bit, without entries; and which of them had one, bool [B, H, K]."""
        batch, heads, slots, _ = self.shared_BHCD.shape
        store = MergedTensor.allocate(self.shared_BHCD, capacity)
        magnitudes = self.magnitudes_2BHC[..., None]
        kept = [gather_rows(part, index_BMK, heads)[..., 0] for part in magnitudes]
        store.write(0, gather_rows(self.shared_BHCD, index_BMK, heads), torch.stack(kept))
        owner, slot = self.entries()
        apart_BHC1 = torch.zeros((batch * heads, slots), dtype=torch.bool, device=slot.device)
        apart_BHC1[owner, slot] = True
        apart = gather_rows(apart_BHC1.view(batch, heads, slots, 1), index_BMK, heads)[..., 0]
        return replace(store, thresholds_BH=self.thresholds_BH), apart

    def restored(self, layer: int, width: int, room: int = 0) -> Tensor:
        """Return one layer's (0 or 1) rows of the first `width` slots, [B, H, width + room, D]; the room is unset."""
        batch, heads, _, dim = self.shared_BHCD.shape
        rows = self.shared_BHCD.new_empty((batch, heads, width + room, dim))
        # In fp32, and rounded once.
        magnitudes = self.magnitudes_2BHC[layer, :, :, :width, None]
        torch.mul(self.shared_BHCD[:, :, :width], magnitudes, out=rows[:, :, :width])
        owner, slot = self.entries()
        flat = rows.view(batch * heads * (width + room), dim)
        flat.index_copy_(0, owner * (width + room) + slot, self.rows_2ED[layer, : self.exceptions])
        return rows

    def entries(self) -> tuple[Tensor, Tensor]:
        """Return (owner, slot) of every exception, int64 [E], ascending by slot, then owner."""
        index = self.index_E[: self.exceptions].long()
        return index % self.owners, index // self.owners

    def first(self, width: int) -> MergedTensor:
        """Return the store without the rows from slot `width` on; buffers are shared."""
        kept = int((self.index_E[: self.exceptions] < width * self.owners).sum())
        return replace(self, exceptions=kept)

    def batch(self, index: Sequence[int]) -> MergedTensor:
        """Return the store with its batch rows selected, repeated or reordered (always a copy)."""
        heads = self.shared_BHCD.shape[1]
        index_J = torch.tensor(list(index), dtype=torch.int64, device=self.shared_BHCD.device)
        owner, slot = self.entries()
        row, entry = (index_J[:, None] == (owner // heads)[None]).nonzero().unbind(1)
        moved, order = (slot[entry] * (len(index) * heads) + row * heads + owner[entry] % heads).sort()
        return MergedTensor(
            shared_BHCD=self.shared_BHCD.index_select(0, index_J),
            magnitudes_2BHC=self.magnitudes_2BHC.index_select(1, index_J),
            thresholds_BH=self.thresholds_BH.index_select(0, index_J),
            index_E=moved.to(torch.int32),
            rows_2ED=self.rows_2ED[:, entry[order]],
            exceptions=moved.shape[0],
        )

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        return (self.shared_BHCD, self.magnitudes_2BHC, self.thresholds_BH, self.index_E, self.rows_2ED)

    def copied(self) -> MergedTensor:
        """Return an independent copy."""
        return self._of([tensor.clone() for tensor in self.tensors()])

    def to(self, device: torch.device) -> MergedTensor:
        """Return the store on another device; self when it lies there."""
        if device == self.shared_BHCD.device:
            return self
        return self._of([tensor.to(device) for tensor in self.tensors()])

    def _of(self, tensors: Sequence[Tensor]) -> MergedTensor:
        shared, magnitudes, thresholds, index, rows = tensors
        return MergedTensor(
            shared_BHCD=shared,
            magnitudes_2BHC=magnitudes,
            thresholds_BH=thresholds,
            index_E=index,
            rows_2ED=rows,
            exceptions=self.exceptions,
        )

    def _with_entries(self, capacity: int) -> MergedTensor:
        index = self.index_E.new_empty(capacity)
        rows = self.rows_2ED.new_empty((2, capacity, self.rows_2ED.shape[2]))
        index[: self.exceptions] = self.index_E[: self.exceptions]
        rows[:, : self.exceptions] = self.rows_2ED[:, : self.exceptions]
        return replace(self, index_E=index, rows_2ED=rows)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedPair:
    """The one store of two layers."""

    layers: tuple[int, int]
    keys: MergedTensor
    values: MergedTensor
    # Slots in use whose rows are merged; behind them lie those of `unmerged`, one entry a layer, if there are any.
    merged_slots: int = 0
    unmerged: tuple[DenseRows, ...] = ()

    @classmethod
    def allocate(cls, layers: tuple[int, int], keys_BHTD: Tensor, values_BHTD: Tensor, capacity: int) -> MergedPair:
        """Return a store of no rows for rows shaped like these."""
        keys, values = (MergedTensor.allocate(rows, capacity) for rows in (keys_BHTD, values_BHTD))
        return cls(layers=layers, keys=keys, values=values)

    @property
    def capacity(self) -> int:
        """Slots per KV head that can be in use."""
        return self.merged_slots + self.unmerged[0].capacity if self.unmerged else self.keys.capacity

    @property
    def device(self) -> torch.device:
        """Where the store lies."""
        return self.keys.shared_BHCD.device

    @property
    def row_bytes(self) -> int:
        """Bytes of one K/V row pair of one layer and KV head, were it not merged."""
        return self.keys.vector_bytes + self.values.vector_bytes

    def payload_bytes(self, live_BMW: Tensor) -> int:
        """Bytes of the live rows, over all owners, with all it takes to restore them in both layers."""
        live_BHW = live_BMW.expand(-1, self.keys.shared_BHCD.shape[1], -1)
        merged = int(live_BHW[:, :, : self.merged_slots].sum())
        apart = int(live_BHW.sum()) - merged
        return self.keys.payload_bytes(merged) + self.values.payload_bytes(merged) + apart * 2 * self.row_bytes

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots and entries, in use or not."""
        return self.keys.slot_bytes + self.values.slot_bytes + sum(rows.slot_bytes for rows in self.unmerged)

    @property
    def thresholds(self) -> tuple[Tensor, Tensor]:
        """From which distance on keys, and values, are exceptions, fp32 [B, H]."""
        return self.keys.thresholds_BH, self.values.thresholds_BH

    def restored(self, layer: int, width: int, room: int = 0) -> tuple[Tensor, Tensor]:
        """Return keys and values of one of the model's two layers, with room for new rows behind them."""
        which, merged = self.layers.index(layer), min(width, self.merged_slots)
        keys, values = (store.restored(which, merged, width - merged + room) for store in (self.keys, self.values))
        if merged < width:
            held = self.unmerged[which].view(width - merged)
            keys[:, :, merged:width], values[:, :, merged:width] = held
        return keys, values

    def holding(self, width: int, rows_2: Sequence[tuple[Tensor, Tensor]]) -> MergedPair:
        """Return the pair with new rows (keys and values of either layer) behind `width` slots, as they are."""
        used, held = width - self.merged_slots, []
        for which, (keys, values) in enumerate(rows_2):
            own = self.unmerged[which] if self.unmerged else DenseRows.allocate(keys, values, keys.shape[2])
            larger = own.grown(used, used + keys.shape[2])
            larger.write(used, keys, values)
            held.append(larger)
        return replace(self, unmerged=tuple(held))

    def held(self, slot: int, rows: int) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of either layer of consecutive slots that are not merged."""
        return [each.held(slot - self.merged_slots, rows) for each in self.unmerged]

    def first(self, width: int) -> MergedPair:
        """Return the pair without the rows from slot `width` on; buffers are shared."""
        if width > self.merged_slots:
            return self
        keys, values = self.keys.first(width), self.values.first(width)
        return replace(self, keys=keys, values=values, merged_slots=width, unmerged=())

    def living(self, live_BMW: Tensor) -> MergedPair:
        """Return the pair without exceptions of rows that are dead."""
        return replace(self, keys=self.keys.living(live_BMW), values=self.values.living(live_BMW))

    def batch(self, index: Sequence[int]) -> MergedPair:
        """Return the pair with its batch rows selected, repeated or reordered (always a copy)."""
        index_J = torch.tensor(list(index), dtype=torch.int64, device=self.device)
        unmerged = tuple(rows.batch(index_J) for rows in self.unmerged)
        return replace(self, keys=self.keys.batch(index), values=self.values.batch(index), unmerged=unmerged)

    def each(self, act: Callable[[Any], Any]) -> MergedPair:
        """Return the pair of what becomes of its parts; a waiting pair shares them with the published one."""
        unmerged = tuple(act(rows) for rows in self.unmerged)
        return replace(self, keys=act(self.keys), values=act(self.values), unmerged=unmerged)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        held = [tensor for rows in self.unmerged for tensor in rows.tensors()]
        return (*self.keys.tensors(), *self.values.tensors(), *held)
