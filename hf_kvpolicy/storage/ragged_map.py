"""Which rows each owner of a ragged layer holds, what they carry, and where they lie.

Letters: N rows, P slots with a number in this map, O owners (batch-major, b * S + s), B batch rows, S stored heads, X
state channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import pad

from .rowmap import RowMap

__all__ = ["RaggedMap", "owners_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedMap:
    """Which row lies in which slot, owner after owner. Immutable.

    Ordered, an owner's n rows ascend by token position in its first n slots. Open (`spare_O` is given), as single rows
    were replaced, they lie in any order in its first n + 1 slots, one of which is dead: what is said of it is void.
    """

    columns_P: Tensor  # int32, position among all columns ever fed, pads included
    tokens_P: Tensor  # int32, position among the real tokens of the batch row
    lengths_O: Tensor  # int32, rows of each owner, on the rows' device
    lengths: tuple[int, ...]  # the same on the host
    heads: int
    states_PX: Tensor | None = None  # what rows carry; None for evidence without any
    spare_O: Tensor | None = None  # int32, the dead slot, which the owner's next row takes

    @classmethod
    def of(
        cls, owners: Sequence[tuple[Tensor, Tensor]], heads: int, states: Sequence[Tensor] | None = None
    ) -> RaggedMap:
        """Return the map of (columns, tokens) per owner, 1-D and ascending, and of the states [n, X] they carry."""
        columns = torch.cat([pair[0] for pair in owners])
        lengths = tuple(pair[0].shape[0] for pair in owners)
        return cls(
            columns_P=columns,
            tokens_P=torch.cat([pair[1] for pair in owners]),
            lengths_O=torch.tensor(lengths, dtype=torch.int32, device=columns.device),
            lengths=lengths,
            heads=heads,
            states_PX=None if states is None else torch.cat(list(states)),
        )

    @classmethod
    def empty(cls, batch: int, heads: int, device: torch.device) -> RaggedMap:
        """Return a map in which no owner holds a row."""
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        return cls.of([(nothing, nothing)] * (batch * heads), heads)

    @property
    def device(self) -> torch.device:
        """Where the map lies."""
        return self.tokens_P.device

    def to(self, device: torch.device) -> RaggedMap:
        """Return the map on another device; self when it lies there."""
        if device == self.device:
            return self
        states, spare = (None if part is None else part.to(device) for part in (self.states_PX, self.spare_O))
        return replace(
            self,
            columns_P=self.columns_P.to(device),
            tokens_P=self.tokens_P.to(device),
            lengths_O=self.lengths_O.to(device),
            states_PX=states,
            spare_O=spare,
        )

    @property
    def batch_size(self) -> int:
        """Batch rows."""
        return len(self.lengths) // self.heads

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each owner's slots begin in this map, and where the last one's end."""
        return tuple(accumulate(self.slot_counts, initial=0))

    @property
    def next_slots_O(self) -> Tensor:
        """The slot that the next row of each owner takes; with it the owner's first n + 1 slots are all live."""
        return self.lengths_O if self.spare_O is None else self.spare_O

    @property
    def is_open(self) -> bool:
        """Whether rows lie in any order, around one dead slot an owner."""
        return self.spare_O is not None

    @property
    def slot_counts(self) -> tuple[int, ...]:
        """The slots of each owner that this map tells of."""
        return tuple(rows + 1 for rows in self.lengths) if self.is_open else self.lengths

    def slots(self) -> Tensor:
        """Return the slot of every row, ascending by token position within an owner, int64 [N]."""
        return self._order()[1]

    def ordered(self) -> RaggedMap:
        """Return what is said of the rows, ascending within each owner, without where they lie; self when ordered."""
        return self if self.spare_O is None else self._taken(self._order()[0], self.lengths, None)

    def opened(self) -> RaggedMap:
        """Return the map with a dead slot behind every ordered owner; self when it is open."""
        if self.is_open:
            return self
        rows = self.tokens_P.shape[0]
        counts_O = self.lengths_O.long() + 1
        owner_P = torch.repeat_interleave(counts_O, output_size=rows + len(self.lengths))
        # The dead slot repeats the next owner's first row; behind the last one there is a row of zeros.
        source_P = torch.arange(owner_P.shape[0], device=self.device) - owner_P
        states = None if self.states_PX is None else pad(self.states_PX, (0, 0, 0, 1))
        columns, tokens = pad(self.columns_P, (0, 1)), pad(self.tokens_P, (0, 1))
        padded = replace(self, columns_P=columns, tokens_P=tokens, states_PX=states)
        return padded._taken(source_P, self.lengths, self.lengths_O)

    def with_spare_behind(self, moves_O: Tensor) -> RaggedMap:
        """Return an open map in which the dead slot of some owners, bool [O], lies behind their rows, which move up."""
        assert self.spare_O is not None, "an ordered map has no dead slot"
        counts_O = self.lengths_O.long() + 1
        owner_P = torch.repeat_interleave(counts_O, output_size=self.tokens_P.shape[0])
        place_P = torch.arange(owner_P.shape[0], device=self.device)
        slot_P = place_P - (counts_O.cumsum(0) - counts_O)[owner_P]
        first_O = torch.where(moves_O, self.spare_O, self.lengths_O)
        up_P = (slot_P >= first_O[owner_P]) & (slot_P < self.lengths_O[owner_P])
        return self._taken(place_P + up_P, self.lengths, torch.where(moves_O, self.lengths_O, self.spare_O))

    def owners(self) -> list[RowMap]:
        """Return each owner's rows, ascending, as a map [1, 1, n] (of an ordered map, windows on this one)."""
        table, lengths = self.ordered(), list(self.lengths)
        live = torch.ones((1, 1, max(lengths, default=0)), dtype=torch.bool, device=self.device)
        parts = zip(torch.split(table.columns_P, lengths), torch.split(table.tokens_P, lengths), strict=True)
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
        owners, offsets, device = owners_of(index, self.heads), self.offsets, self.device
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        parts = [torch.arange(offsets[o], offsets[o + 1], device=device) for o in owners]
        spare = self.spare_O
        if spare is not None:
            spare = spare.index_select(0, torch.tensor(owners, dtype=torch.int64, device=device))
        return self._taken(torch.cat([nothing, *parts]), [self.lengths[o] for o in owners], spare)

    def extended(
        self, counts: Sequence[int], columns_N: Tensor, tokens_N: Tensor, states_NX: Tensor | None
    ) -> RaggedMap:
        """Return an ordered map with so many rows behind each owner's own, given owner after owner."""
        assert not self.is_open, "rows are added in order"
        lengths = [old + new for old, new in zip(self.lengths, counts, strict=True)]
        # Where each row of the result is found: among the old ones, or behind all of them.
        runs, old, new = [], 0, self.tokens_P.shape[0]
        for held, added in zip(self.lengths, counts, strict=True):
            runs += [(old, held), (new, added)]
            old, new = old + held, new + added
        first, size = (torch.tensor(part, device=self.device) for part in zip(*runs, strict=True))
        run_P = torch.repeat_interleave(size, output_size=sum(lengths))
        index_P = first[run_P] + torch.arange(sum(lengths), device=self.device) - (size.cumsum(0) - size)[run_P]
        both = replace(
            self,
            columns_P=torch.cat([self.columns_P, columns_N]),
            tokens_P=torch.cat([self.tokens_P, tokens_N]),
            states_PX=None if self.states_PX is None or states_NX is None else torch.cat([self.states_PX, states_NX]),
        )
        return both._taken(index_P, lengths, None)

    def before_column(self, column: int) -> RaggedMap:
        """Return an ordered map without rows at or after a column (each owner's last ones, since rows ascend)."""
        assert not self.is_open, "rows are packed before any is taken back"
        stays = self.columns_P < column
        lengths = [int(part.sum()) for part in torch.split(stays, list(self.lengths))]
        return self._taken(stays.nonzero()[:, 0], lengths, None)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        optional = (self.states_PX, self.spare_O)
        return self.columns_P, self.tokens_P, self.lengths_O, *(part for part in optional if part is not None)

    def _order(self) -> tuple[Tensor, Tensor]:
        """Return where every row stands in this map, ascending within an owner, and its slot, int64 [N] each."""
        device, counts = self.device, self.slot_counts
        slot_P = torch.cat([torch.arange(n, device=device) for n in counts])
        place_P = torch.arange(slot_P.shape[0], device=device)
        if self.spare_O is None:
            return place_P, slot_P
        owner_P = torch.repeat_interleave(torch.tensor(counts, device=device), output_size=sum(counts))
        live_P = slot_P != self.spare_O.long().index_select(0, owner_P)
        order_N = place_P[live_P]
        order_N = order_N[(owner_P * (1 << 32) + self.columns_P)[order_N].argsort()]
        return order_N, slot_P[order_N]

    def _taken(self, index: Tensor, lengths: Sequence[int], spare_O: Tensor | None) -> RaggedMap:
        states = self.states_PX
        return replace(
            self,
            columns_P=self.columns_P.index_select(0, index),
            tokens_P=self.tokens_P.index_select(0, index),
            lengths_O=torch.tensor(lengths, dtype=torch.int32, device=self.device),
            lengths=tuple(lengths),
            states_PX=None if states is None else states.index_select(0, index),
            spare_O=spare_O,
        )


def owners_of(index: Sequence[int], heads: int) -> list[int]:
    """Return the owners of batch rows, in their order."""
    return [row * heads + head for row in index for head in range(heads)]
