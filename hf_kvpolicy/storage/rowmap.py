"""Which row lies in which slot: immutable maps that give slots their meaning.

Letters: B batch rows, M map heads (KV heads, or 1 where heads share one set), W slots described by the map.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["RowMap"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMap:
    """Columns, token positions and live flags of W slots.

    Tensors are never written after construction; a change is a new map. A dead slot's numbers are meaningless.
    """

    columns_BMW: Tensor  # int32, position among all columns ever fed, pads included
    tokens_BMW: Tensor  # int32, position among the real tokens of the batch row
    live_BMW: Tensor  # bool
    # Whether live slots appear in ascending token order; a ring loses this when it wraps.
    ordered: bool

    @classmethod
    def empty(cls, batch: int, device: torch.device) -> RowMap:
        """Return a map of no slots."""
        numbers = torch.empty((batch, 1, 0), dtype=torch.int32, device=device)
        return cls(columns_BMW=numbers, tokens_BMW=numbers, live_BMW=numbers.bool(), ordered=True)

    @property
    def device(self) -> torch.device:
        """Where the map lies."""
        return self.live_BMW.device

    @property
    def width(self) -> int:
        """Slots described."""
        return self.live_BMW.shape[2]

    @property
    def map_heads(self) -> int:
        """1 if all KV heads share this map, else the number of stored heads."""
        return self.live_BMW.shape[1]

    def then(self, other: RowMap) -> RowMap:
        """Return the map of these slots followed by the other's; a shared map is broadcast to the other's heads."""
        if not self.width:
            return other
        if not other.width:
            return self
        heads = max(self.map_heads, other.map_heads)
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        columns, tokens, live = (torch.cat([_heads(a, heads), _heads(b, heads)], dim=2) for a, b in pairs)
        ordered = self.ordered and other.ordered
        return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live, ordered=ordered)

    def first(self, slots: int) -> RowMap:
        """Return the map of the first slots (copied: a slice would keep the whole tensor alive)."""
        columns, tokens, live = (part[:, :, :slots].clone() for part in self._tensors())
        return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live, ordered=self.ordered)

    def last(self, slots: int) -> RowMap:
        """Return the map of the last slots (copied, like `first`)."""
        columns, tokens, live = (part[:, :, part.shape[2] - slots :].clone() for part in self._tensors())
        return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live, ordered=self.ordered)

    def gathered(self, index_BMK: Tensor, live_BMK: Tensor, *, ordered: bool) -> RowMap:
        """Return the map of the gathered slots; `live_BMK` marks which of them hold a row."""
        heads = index_BMK.shape[1]
        columns, tokens, live = (_heads(part, heads).gather(2, index_BMK) for part in self._tensors())
        return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live & live_BMK, ordered=ordered)

    def batch(self, index_B: Tensor) -> RowMap:
        """Return the map with its batch rows selected, repeated or reordered."""
        columns, tokens, live = (part.index_select(0, index_B) for part in self._tensors())
        return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live, ordered=self.ordered)

    def before_column(self, column: int) -> RowMap:
        """Return the map with rows at or after a column marked dead."""
        live = self.live_BMW & (self.columns_BMW < column)
        return RowMap(columns_BMW=self.columns_BMW, tokens_BMW=self.tokens_BMW, live_BMW=live, ordered=self.ordered)

    def to(self, device: torch.device) -> RowMap:
        """Return the map on another device; self when it lies there."""
        if device == self.live_BMW.device:
            return self
        columns, tokens, live = (part.to(device) for part in self._tensors())
        return RowMap(columns_BMW=columns, tokens_BMW=tokens, live_BMW=live, ordered=self.ordered)

    def _tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.columns_BMW, self.tokens_BMW, self.live_BMW


def _heads(part_BMW: Tensor, heads: int) -> Tensor:
    return part_BMW if part_BMW.shape[1] == heads else part_BMW.expand(-1, heads, -1)
