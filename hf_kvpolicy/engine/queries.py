"""Holding the last queries of a segment, across chunks and per batch row.

Letters: B batch rows, T new queries, W held queries, Q query heads, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .inputs import ForwardInputs

__all__ = ["QueryWindow", "held", "hold_window", "windowed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QueryWindow:
    """Which queries are held: the last real ones of each batch row. The same for every layer."""

    columns_BW: Tensor  # int64, [B or 1, W]
    real_BW: Tensor | None  # bool; None when all held queries are real
    # Where they lie among (held before ++ new ones); None when they are simply the last ones.
    index_BW: Tensor | None

    @property
    def width(self) -> int:
        """Held queries per batch row."""
        return self.columns_BW.shape[1]

    def before_column(self, column: int) -> QueryWindow:
        """Return the window with queries at or after a column marked as not there."""
        real = self.columns_BW < column
        return QueryWindow(
            columns_BW=self.columns_BW, real_BW=real if self.real_BW is None else real & self.real_BW, index_BW=None
        )

    def batch(self, index_B: Tensor) -> QueryWindow:
        """Return the window with its batch rows selected, repeated or reordered."""
        columns, real = self.columns_BW, self.real_BW
        return QueryWindow(
            columns_BW=columns if columns.shape[0] == 1 else columns.index_select(0, index_B),
            real_BW=real if real is None or real.shape[0] == 1 else real.index_select(0, index_B),
            index_BW=None,
        )

    def to(self, device: torch.device) -> QueryWindow:
        """Return the window on another device; self when it lies there."""
        if device == self.columns_BW.device:
            return self
        real, index = (None if part is None else part.to(device) for part in (self.real_BW, self.index_BW))
        return QueryWindow(columns_BW=self.columns_BW.to(device), real_BW=real, index_BW=index)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        return tuple(part for part in (self.columns_BW, self.real_BW, self.index_BW) if part is not None)

    def last(self, keep: int) -> QueryWindow:
        """Return the last `keep` real queries of each row among the held ones."""
        return _choose(self.columns_BW, self.real_BW, keep)


def hold_window(before: QueryWindow | None, inputs: ForwardInputs, first_column: int, keep: int) -> QueryWindow:
    """Return which of the queries held before and the new ones are held now."""
    columns = torch.arange(first_column, first_column + inputs.length, device=inputs.device)[None]
    real = inputs.real_BT
    if before is not None:
        rows = inputs.batch
        if real is not None or before.real_BW is not None:
            new = torch.ones((rows, inputs.length), dtype=torch.bool, device=inputs.device) if real is None else real
            old = before.real_BW
            old = torch.ones_like(new[:, :1]).expand(rows, before.width) if old is None else old
            real = torch.cat([old.expand(rows, -1), new], dim=1)
        columns = torch.cat([before.columns_BW, columns.expand(before.columns_BW.shape[0], -1)], dim=1)
    return _choose(columns, real, keep)


def held(before_BQWD: Tensor | None, new_BQTD: Tensor, window: QueryWindow) -> Tensor:
    """Return one layer's held queries as a tensor of their own."""
    every = new_BQTD if before_BQWD is None else torch.cat([before_BQWD, new_BQTD], dim=2)
    if window.index_BW is None:
        return every[:, :, every.shape[2] - window.width :].clone()
    batch, heads, _, dim = every.shape
    index = window.index_BW.to(every.device)[:, None, :, None].expand(batch, heads, -1, dim)
    return every.gather(2, index)


def windowed(held_BQWD: Tensor, window: QueryWindow) -> Tensor:
    """Return the queries that a window taken by `last` names among the held ones."""
    if window.index_BW is None:
        return held_BQWD[:, :, held_BQWD.shape[2] - window.width :]
    batch, heads, _, dim = held_BQWD.shape
    index = window.index_BW.to(held_BQWD.device)[:, None, :, None].expand(batch, heads, -1, dim)
    return held_BQWD.gather(2, index)


def _choose(columns_BN: Tensor, real_BN: Tensor | None, keep: int) -> QueryWindow:
    keep = min(keep, columns_BN.shape[1])
    if real_BN is None:
        first = columns_BN.shape[1] - keep
        return QueryWindow(columns_BW=columns_BN[:, first:].clone(), real_BW=None, index_BW=None)
    # Real queries move to the end, in order; pads come first and are marked.
    index = torch.argsort(real_BN.int(), dim=1, stable=True)[:, columns_BN.shape[1] - keep :]
    columns = columns_BN.expand(real_BN.shape[0], -1).gather(1, index)
    return QueryWindow(columns_BW=columns, real_BW=real_BN.gather(1, index), index_BW=index)
