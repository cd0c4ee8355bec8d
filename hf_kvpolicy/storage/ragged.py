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

import torch
from torch import Tensor

from .dense import growth_slots, stored_tensors
from .ragged_view import RaggedView
from .rowmap import RowMap

__all__ = ["RaggedLayer", "RaggedMap", "RaggedRows"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedMap:
    """Which rows each owner holds, ascending by token position, owner after owner. Immutable; every row is live."""

    columns_N: Tensor  # int32, position among all columns ever fed, pads included
    tokens_N: Tensor  # int32, position among the real tokens of the batch row
    lengths_O: Tensor  # int32, rows of each owner, on the rows' device
    lengths: tuple[int, ...]  # the same on the host
    heads: int

    @classmethod
    def of(cls, owners: Sequence[tuple[Tensor, Tensor]], heads: int) -> RaggedMap:
        """Return the map of (columns, tokens) per owner, each 1-D and ascending; at least one owner."""
        columns = torch.cat([pair[0] for pair in owners])
        lengths = tuple(pair[0].shape[0] for pair in owners)
        return cls(
            columns_N=columns,
            tokens_N=torch.cat([pair[1] for pair in owners]),
            lengths_O=torch.tensor(lengths, dtype=torch.int32, device=columns.device),
            lengths=lengths,
            heads=heads,
        )

    @classmethod
    def empty(cls, batch: int, heads: int, device: torch.device) -> RaggedMap:
        """Return a map in which no owner holds a row."""
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        return cls.of([(nothing, nothing)] * (batch * heads), heads)

    @property
    def device(self) -> torch.device:
        """Where the map lies."""
        return self.tokens_N.device

    def to(self, device: torch.device) -> RaggedMap:
        """Return the map on another device; self when it lies there."""
        if device == self.device:
            return self
        columns, tokens, lengths = (part.to(device) for part in self.tensors())
        return replace(self, columns_N=columns, tokens_N=tokens, lengths_O=lengths)

    @property
    def batch_size(self) -> int:
        """Batch rows."""
        return len(self.lengths) // self.heads

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each owner's rows begin in this map, and where the last one's end."""
        return tuple(accumulate(self.lengths, initial=0))

    def owners(self) -> list[RowMap]:
        """Return each owner's rows as a map [1, 1, n] (windows on this one)."""
        parts = self._by_owner()
        live = torch.ones((1, 1, max(self.lengths, default=0)), dtype=torch.bool, device=self.tokens_N.device)
        return [
            RowMap(
                columns_BMW=columns[None, None],
                tokens_BMW=tokens[None, None],
                live_BMW=live[:, :, : tokens.shape[0]],
                ordered=True,
            )
            for columns, tokens in parts
        ]

    def batch(self, index: Sequence[int]) -> RaggedMap:
        """Return the map with its batch rows selected, repeated or reordered."""
        if not index:
            return replace(
                self, columns_N=self.columns_N[:0].clone(), tokens_N=self.tokens_N[:0].clone(),
                lengths_O=self.lengths_O[:0].clone(), lengths=(),
            )  # fmt: skip
        owners = self._by_owner()
        return RaggedMap.of([owners[o] for o in _owners_of(index, self.heads)], self.heads)

    def before_column(self, column: int) -> RaggedMap:
        """Return the map without rows at or after a column (each owner's last ones, since rows ascend)."""
        owners = []
        for columns, tokens in self._by_owner():
            kept = int((columns < column).sum())
            owners.append((columns[:kept], tokens[:kept]))
        return RaggedMap.of(owners, self.heads)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        return self.columns_N, self.tokens_N, self.lengths_O

    def _by_owner(self) -> list[tuple[Tensor, Tensor]]:
        lengths = list(self.lengths)
        return list(zip(torch.split(self.columns_N, lengths), torch.split(self.tokens_N, lengths), strict=True))


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
        if device == self.device:
            return self
        keys, values, starts = (part.to(device) for part in self.tensors())
        return replace(self, keys_ND=keys, values_ND=values, starts_O=starts)

    @property
    def slots(self) -> int:
        """Slots of all owners."""
        return self.keys_ND.shape[0]

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
        batch, heads, rows, _ = keys_BSTD.shape
        slots = (self.starts_O + lengths_O.to(self.starts_O.device)).long() + behind
        if rows > 1:
            slots = (slots[:, None] + torch.arange(rows, device=slots.device)).flatten()
        self.keys_ND.index_copy_(0, slots, keys_BSTD.reshape(batch * heads * rows, -1))
        self.values_ND.index_copy_(0, slots, values_BSTD.reshape(batch * heads * rows, -1))

    def owner(self, owner: int, rows: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of an owner's first rows, [rows, D] (windows, not copies)."""
        begin = self.starts[owner]
        return self.keys_ND[begin : begin + rows], self.values_ND[begin : begin + rows]

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

    def batch(self, index: Sequence[int]) -> RaggedRows:
        """Return buffers with their batch rows selected, repeated or reordered (always a copy, slack included)."""
        owners = _owners_of(index, self.heads)
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
    """One layer's published ragged rows: buffers, and the map that gives their first slots a meaning."""

    rows: RaggedRows
    map: RaggedMap

    def batch(self, index: Sequence[int]) -> RaggedLayer:
        """Return the layer with its batch rows selected, repeated or reordered."""
        return RaggedLayer(rows=self.rows.batch(index), map=self.map.batch(index))


def _owners_of(index: Sequence[int], heads: int) -> list[int]:
    return [row * heads + head for row in index for head in range(heads)]
