"""Which rows of a view each query may see, evaluated on the columns of the rows really held.

Letters: B batch rows, M map heads, T queries, N rows of the view, F columns ever fed, P pinned rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..masks import MaskRecord
from ..storage import RowMap

__all__ = ["SeenRows", "Visibility"]


@dataclass(slots=True, kw_only=True, eq=False)
class Visibility:
    """The masks of one forward; identical ones are built once and shared by the layers that need them."""

    record: MaskRecord
    # Columns fed once this forward ends.
    columns_after: int
    # All rows of the view are live in every batch row, and no current mask hides one.
    dense: bool
    changed_mask_BF: Tensor | None
    # How far pinned rows are moved towards the query, [B, P]: a window sees the moved columns.
    pinned_shift_BP: Tensor | None = None
    # Whether the newest query sees every row of the view.
    is_plain: bool = field(init=False)
    _memo: dict[tuple[int, int, int], tuple[Tensor, RowMap, Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Note once whether a single query sees every row."""
        self.is_plain = self.dense and self.record.is_causal_for(self.columns_after)

    def for_queries(self, view: RowMap, query_columns_BT: Tensor) -> Tensor | None:
        """Return the bool mask [B or 1, M or 1, T, N], or None when every query sees every row.

        Args:
            view: map of the attended rows; the newest columns come last, in order.
            query_columns_BT: columns of the queries, [B or 1, T]; the newest columns of each batch row.
        """
        queries, rows = query_columns_BT.shape[1], view.width
        if self.is_plain:
            # All older rows are seen whatever their columns, so layers and heads share one triangle.
            if queries == 1:
                return None
            key = (0, queries, rows)
            if key not in self._memo:
                ones = torch.ones((queries, rows), dtype=torch.bool, device=view.live_BMW.device)
                self._memo[key] = (ones.tril(rows - queries)[None, None], view, query_columns_BT)
            return self._memo[key][0]
        key = (id(view), id(query_columns_BT), rows)
        if key not in self._memo:
            # The tensors behind the key are kept, so that no other object can take their identity.
            self._memo[key] = (self._evaluate(view, query_columns_BT), view, query_columns_BT)
        return self._memo[key][0]

    def for_block(self, view: RowMap, query_columns_BT: Tensor, start: int, total: int) -> tuple[Tensor | None, int]:
        """Return (mask, rows that any of them sees) for some of a segment's queries: the ones from `start` of `total`.

        The newest `total` rows of the view are those queries' own, in order. A mask of fewer rows is about the newest
        of those that are seen. Nothing is remembered: masks of all blocks together would grow with the square of the
        segment.
        """
        queries, rows = query_columns_BT.shape[1], view.width
        if not self.is_plain:
            return self._evaluate(view, query_columns_BT), rows
        seen = rows - total + start + queries
        if queries == 1:
            return None, seen
        return torch.ones((queries, queries), dtype=torch.bool, device=view.live_BMW.device).tril()[None, None], seen

    def _evaluate(self, view: RowMap, query_columns_BT: Tensor) -> Tensor:
        rows_BM1N = self._effective_columns(view)[:, :, None, :]
        allowed = self.record.allows(query_columns_BT.long()[:, None, :, None], rows_BM1N)
        if self.dense:
            return allowed
        allowed = allowed & view.live_BMW[:, :, None, :]
        if self.changed_mask_BF is not None:
            allowed = allowed & self._current(view)[:, :, None, :]
        return allowed

    def _effective_columns(self, view: RowMap) -> Tensor:
        columns = view.columns_BMW.long()
        if self.pinned_shift_BP is None:
            return columns
        pinned = self.pinned_shift_BP.shape[1]
        moved = columns[:, :, :pinned] + self.pinned_shift_BP[:, None, :]
        return torch.cat([moved, columns[:, :, pinned:]], dim=2)

    def _current(self, view: RowMap) -> Tensor:
        assert self.changed_mask_BF is not None
        batch, heads, width = view.live_BMW.shape
        last = self.changed_mask_BF.shape[1] - 1
        index = view.columns_BMW.long().clamp(0, last).reshape(batch, heads * width)
        return self.changed_mask_BF.gather(1, index).view(batch, heads, width)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SeenRows:
    """Which candidate rows some queries see (evidence asks; see `evidence.base.Visibility`)."""

    visibility: Visibility
    view: RowMap
    columns_BW: Tensor

    def __call__(self) -> Tensor | None:
        """Return the mask [B, M, W, N] of all queries, or None."""
        return self.visibility.for_queries(self.view, self.columns_BW)

    def block(self, start: int, stop: int) -> tuple[Tensor | None, int]:
        """Return the mask of queries `start` to `stop`, and how many of the first rows any of them sees."""
        total = self.columns_BW.shape[1]
        return self.visibility.for_block(self.view, self.columns_BW[:, start:stop], start, total)
