"""Which rows each owner of a ragged layer holds, what they carry, and where they lie.

Letters: N rows, O owners (batch-major, b * S + s), B batch rows, S stored heads, X state channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from .rowmap import RowMap

__all__ = ["RaggedMap", "owners_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedMap:
    """Which rows each owner holds, ascending by token position, owner after owner. Immutable; every row is live."""

    columns_N: Tensor  # int32, position among all columns ever fed, pads included
    tokens_N: Tensor  # int32, position among the real tokens of the batch row
    lengths_O: Tensor  # int32, rows of each owner, on the rows' device
    lengths: tuple[int, ...]  # the same on the host
    heads: int
    states_NX: Tensor | None = None  # what rows carry; None for evidence without any
    # Once single rows were replaced: where each row lies in its owner's region, and the slot its owner's next row
    # takes, int32. An owner of n rows then lies in its first n + 1 slots, one of them dead. None: row k is in slot k.
    slots_N: Tensor | None = None
    spare_O: Tensor | None = None

    @classmethod
    def of(
        cls, owners: Sequence[tuple[Tensor, Tensor]], heads: int, states: Sequence[Tensor] | None = None
    ) -> RaggedMap:
        """Return the map of (columns, tokens) per owner, 1-D and ascending, and of the states [n, X] they carry."""
        columns = torch.cat([pair[0] for pair in owners])
        lengths = tuple(pair[0].shape[0] for pair in owners)
        return cls(
            columns_N=columns,
            tokens_N=torch.cat([pair[1] for pair in owners]),
            lengths_O=torch.tensor(lengths, dtype=torch.int32, device=columns.device),
            lengths=lengths,
            heads=heads,
            states_NX=None if states is None else torch.cat(list(states)),
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
        states, slots, spare = (
            None if part is None else part.to(device) for part in (self.states_NX, self.slots_N, self.spare_O)
        )
        return RaggedMap(
            columns_N=self.columns_N.to(device),
            tokens_N=self.tokens_N.to(device),
            lengths_O=self.lengths_O.to(device),
            lengths=self.lengths,
            heads=self.heads,
            states_NX=states,
            slots_N=slots,
            spare_O=spare,
        )

    @property
    def batch_size(self) -> int:
        """Batch rows."""
        return len(self.lengths) // self.heads

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each owner's rows begin in this map, and where the last one's end."""
        return tuple(accumulate(self.lengths, initial=0))

    @property
    def next_slots_O(self) -> Tensor:
        """The slot that the next row of each owner takes; with it the owner's first n + 1 slots are all live."""
        return self.lengths_O if self.spare_O is None else self.spare_O

    def slots(self) -> Tensor:
        """Return the slot of every row, int64."""
        if self.slots_N is not None:
            return self.slots_N.long()
        device = self.columns_N.device
        return torch.cat([torch.arange(rows, device=device) for rows in self.lengths])

    def owners(self) -> list[RowMap]:
        """Return each owner's rows as a map [1, 1, n] (windows on this one)."""
        live = torch.ones((1, 1, max(self.lengths, default=0)), dtype=torch.bool, device=self.tokens_N.device)
        lengths = list(self.lengths)
        parts = zip(torch.split(self.columns_N, lengths), torch.split(self.tokens_N, lengths), strict=True)
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
        owners, offsets, device = owners_of(index, self.heads), self.offsets, self.columns_N.device
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        parts = [torch.arange(offsets[o], offsets[o + 1], device=device) for o in owners]
        spare = self.spare_O
        if spare is not None:
            spare = spare.index_select(0, torch.tensor(owners, dtype=torch.int64, device=device))
        return self._taken(torch.cat([nothing, *parts]), [self.lengths[o] for o in owners], spare)

    def before_column(self, column: int) -> RaggedMap:
        """Return the map without rows at or after a column (each owner's last ones, since rows ascend)."""
        stays = self.columns_N < column
        lengths = [int(part.sum()) for part in torch.split(stays, list(self.lengths))]
        return self._taken(stays.nonzero()[:, 0], lengths, self.spare_O)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        optional = (self.states_NX, self.slots_N, self.spare_O)
        return self.columns_N, self.tokens_N, self.lengths_O, *(part for part in optional if part is not None)

    def _taken(self, index_N: Tensor, lengths: Sequence[int], spare_O: Tensor | None) -> RaggedMap:
        states, slots = self.states_NX, self.slots_N
        return RaggedMap(
            columns_N=self.columns_N.index_select(0, index_N),
            tokens_N=self.tokens_N.index_select(0, index_N),
            lengths_O=torch.tensor(lengths, dtype=torch.int32, device=self.columns_N.device),
            lengths=tuple(lengths),
            heads=self.heads,
            states_NX=None if states is None else states.index_select(0, index_N),
            slots_N=None if slots is None else slots.index_select(0, index_N),
            spare_O=spare_O,
        )


def owners_of(index: Sequence[int], heads: int) -> list[int]:
    """Return the owners of batch rows, in their order."""
    return [row * heads + head for row in index for head in range(heads)]
