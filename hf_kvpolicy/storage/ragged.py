"""Ragged K/V of one layer: flat slots, in which every owner has a region of its own length.

An owner is one stored head of one batch row, counted batch-major: b * heads + s. Each owner's rows lie back to back
at the start of its region; the slots behind them are slack, so that an append writes in place. Nothing is padded to a
common length, neither K/V nor the numbers that describe rows.

Letters: N flat slots or rows, O owners, B batch rows, S stored heads, T new rows, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .dense import growth_slots, stored_tensors
from .ragged_map import RaggedMap, owners_of
from .ragged_view import RaggedView

if TYPE_CHECKING:
    from .trailing import TrailingSegments

__all__ = ["RaggedLayer", "RaggedRows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedRows:
    """Flat K/V buffers of one layer. The object is immutable; slots that no published map names may be written."""

    keys_ND: Tensor
    values_ND: Tensor
    starts_O: Tensor  # int32, first slot of each owner, on the rows' device
    starts: tuple[int, ...]  # the same on the host
    capacities: tuple[int, ...]  # slots of each owner
    heads: int

    @classmethod
    def allocate(cls, like_keys: Tensor, like_values: Tensor, capacities: Sequence[int], heads: int) -> RaggedRows:
        """Return uninitialised buffers with rows shaped like the given ones (their last axis, dtype and device)."""
        starts = tuple(accumulate(capacities, initial=0))
        with stored_tensors():
            return cls(
                keys_ND=like_keys.new_empty((starts[-1], like_keys.shape[-1])),
                values_ND=like_values.new_empty((starts[-1], like_values.shape[-1])),
                starts_O=torch.tensor(starts[:-1], dtype=torch.int32, device=like_keys.device),
                starts=starts[:-1],
                capacities=tuple(capacities),
                heads=heads,
            )

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.keys_ND.device

    def to(self, device: torch.device) -> RaggedRows:
        """Return the buffers on another device; self when they lie there."""
        return self if device == self.device else self.of([tensor.to(device) for tensor in self.tensors()])

    def of(self, tensors: Sequence[Tensor]) -> RaggedRows:
        """Return the same rows over other tensors, in the order of `tensors()`."""
        keys, values, starts = tensors
        return replace(self, keys_ND=keys, values_ND=values, starts_O=starts)

    @property
    def slots(self) -> int:
        """Slots of all owners."""
        return self.keys_ND.shape[0]

    @property
    def coded_slots(self) -> int:
        """Slots whose rows are coded in few bits: none here (`CodedRaggedRows` has some)."""
        return 0

    @property
    def slot_bytes(self) -> int:
        """Bytes of all slots, in use or not."""
        return self.slots * self.row_bytes

    @property
    def row_bytes(self) -> int:
        """Bytes of one K/V row pair."""
        key_bytes = self.keys_ND.shape[1] * self.keys_ND.element_size()
        return key_bytes + self.values_ND.shape[1] * self.values_ND.element_size()

    def grown(self, used: Sequence[int], needed: Sequence[int]) -> RaggedRows:
        """Return buffers with room for `needed` slots an owner and the first `used` copied; self when there is room.

        All owners get new slack at once, so that a copy is paid for by at least the smallest slack's appends.
        """
        if all(need <= room for need, room in zip(needed, self.capacities, strict=True)):
            return self
        larger = RaggedRows.allocate(self.keys_ND, self.values_ND, [growth_slots(n) for n in needed], self.heads)
        for old, new, rows in zip(self.starts, larger.starts, used, strict=True):
            larger.keys_ND[new : new + rows] = self.keys_ND[old : old + rows]
            larger.values_ND[new : new + rows] = self.values_ND[old : old + rows]
        return larger

    def write(self, lengths_O: Tensor, behind: int, keys_BSTD: Tensor, values_BSTD: Tensor) -> None:
        """Write T rows of every owner `behind` slots after its first `lengths_O` ones."""
        rows = keys_BSTD.shape[2]
        slots = (self.starts_O + lengths_O.to(self.starts_O.device)).long() + behind
        if rows > 1:
            slots = (slots[:, None] + torch.arange(rows, device=slots.device)).flatten()
        self.write_at(slots, keys_BSTD, values_BSTD)

    def write_at(self, slots: Tensor, keys_BSTD: Tensor, values_BSTD: Tensor) -> None:
        """Write T rows of every owner into flat slots, int64 [O * T]."""
        self.keys_ND.index_copy_(0, slots, keys_BSTD.reshape(slots.shape[0], -1))
        self.values_ND.index_copy_(0, slots, values_BSTD.reshape(slots.shape[0], -1))

    def put(self, slots_N: Tensor, keys_ND: Tensor, values_ND: Tensor) -> None:
        """Write rows into slots."""
        self.keys_ND.index_copy_(0, slots_N, keys_ND)
        self.values_ND.index_copy_(0, slots_N, values_ND)

    def owner(self, owner: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of an owner's first rows, [rows, D] (windows, not copies)."""
        begin = self.starts[owner]
        return self.keys_ND[begin : begin + rows], self.values_ND[begin : begin + rows]

    def flat(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of all owners' slots, [N, D]."""
        return self.keys_ND, self.values_ND

    def view(self, base: RaggedMap, behind: int) -> RaggedView:
        """Return what attention reads: each owner's rows of a map and the `behind` ones after them."""
        return RaggedView(
            keys_ND=self.keys_ND,
            values_ND=self.values_ND,
            heads=self.heads,
            starts=self.starts,
            lengths=tuple(length + behind for length in base.lengths),
            starts_O=self.starts_O,
            base_lengths_O=base.lengths_O.to(self.starts_O.device),
            tail_rows=behind,
        )

    def taken(self, slots_N: Tensor, lengths: Sequence[int]) -> RaggedRows:
        """Return buffers of some slots of each owner, given owner after owner, in this order (always a copy)."""
        new = RaggedRows.allocate(self.keys_ND, self.values_ND, [growth_slots(n) for n in lengths], self.heads)
        device = self.device
        counts_O = torch.tensor(lengths, device=device)
        owner_N = torch.repeat_interleave(counts_O, output_size=sum(lengths))
        source_N = self.starts_O.long()[owner_N] + slots_N.to(device)
        first_O = new.starts_O.long() - (counts_O.cumsum(0) - counts_O)
        target_N = first_O[owner_N] + torch.arange(sum(lengths), device=device)
        new.keys_ND.index_copy_(0, target_N, self.keys_ND.index_select(0, source_N))
        new.values_ND.index_copy_(0, target_N, self.values_ND.index_select(0, source_N))
        return new

    def batch(self, index: Sequence[int]) -> RaggedRows:
        """Return buffers with their batch rows selected, repeated or reordered (always a copy, slack included)."""
        owners = owners_of(index, self.heads)
        capacities = [self.capacities[o] for o in owners]
        chosen = RaggedRows.allocate(self.keys_ND, self.values_ND, capacities, self.heads)
        if owners:
            parts = [(self.starts[o], self.starts[o] + self.capacities[o]) for o in owners]
            torch.cat([self.keys_ND[begin:end] for begin, end in parts], out=chosen.keys_ND)
            torch.cat([self.values_ND[begin:end] for begin, end in parts], out=chosen.values_ND)
        return chosen

    def copied(self) -> RaggedRows:
        """Return an independent copy."""
        return self.batch(range(len(self.starts) // self.heads))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        return self.keys_ND, self.values_ND, self.starts_O


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedLayer:
    """One layer's published ragged rows: buffers, and the map that gives their first slots a meaning.

    Where tokens are merged, the segment that still grows lies beside the slots (`trailing`), a row more an owner.
    """

    rows: RaggedRows
    map: RaggedMap
    trailing: TrailingSegments | None = None

    @property
    def slot_bytes(self) -> int:
        """Bytes of all K/V, in use or not."""
        own = 0 if self.trailing is None else self.trailing.masses_BH.numel() * self.trailing.row_bytes
        return self.rows.slot_bytes + own

    def payload_bytes(self, rows_behind: int) -> int:
        """Bytes of the map's rows and of so many behind them (over all owners): appended, or trailing."""
        behind = self.rows if self.trailing is None else self.trailing
        return sum(self.map.lengths) * self.rows.row_bytes + rows_behind * behind.row_bytes

    def batch(self, index: Sequence[int]) -> RaggedLayer:
        """Return the layer with its batch rows selected, repeated or reordered."""
        trailing = self.trailing
        if trailing is not None:
            trailing = trailing.batch(torch.tensor(list(index), dtype=torch.int64, device=trailing.device))
        return RaggedLayer(rows=self.rows.batch(index), map=self.map.batch(index), trailing=trailing)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor beside the buffers' own."""
        return (*self.map.tensors(), *(() if self.trailing is None else self.trailing.tensors()))

    def packed(self) -> RaggedLayer:
        """Return the layer with every owner's rows in order and without a dead slot; a copy unless they lie so."""
        if not self.map.is_open:
            return self
        return RaggedLayer(rows=self.rows.taken(self.map.slots(), self.map.lengths), map=self.map.ordered())
