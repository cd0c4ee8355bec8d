"""Which rows of a view each query may see, and what a family adds to their logits, by the rows really held.

Letters: B batch rows, M map heads, Q query heads, T queries, N rows of the view, F columns ever fed, P pinned rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks import MaskRecord
from ..positions import AlibiSpec, alibi_bias
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
    # How logits are biased by distance, in families without positions in keys. Masks are then biases, -inf where a row
    # is hidden.
    alibi: AlibiSpec | None = None
    # Whether the newest query sees every row of the view.
    is_plain: bool = field(init=False)
    _latest: tuple[Tensor, RowMap, Tensor] | None = field(init=False, default=None)
    _memo: dict[tuple[int, int, int], tuple[Tensor, RowMap, Tensor]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Note once whether a single query sees every row."""
        self.is_plain = self.dense and self.record.is_causal_for(self.columns_after)

    def for_queries(self, view: RowMap, query_columns_BT: Tensor) -> Tensor | None:
        """Return the mask [B or 1, M or 1, T, N] (with ALiBi [B, Q, T or 1, N]), or None when it would do nothing.

        Args:
            view: map of the attended rows; the newest columns come last, in order.
            query_columns_BT: columns of the queries, [B or 1, T]; the newest columns of each batch row.
        """
        if self.alibi is None:
            return self._seen(view, query_columns_BT)
        # One is remembered, for layers that share a view: those of all views would be as large as all logits.
        latest = self._latest
        if latest is None or latest[1] is not view or latest[2] is not query_columns_BT:
            biased = self._biased(view, self._seen(view, query_columns_BT))
            latest = self._latest = (biased, view, query_columns_BT)
        return latest[0]

    def of_owner(self, head: int, heads: int) -> Visibility:
        """Return what the query heads of one of so many stored heads see."""
        if self.alibi is None:
            return self
        group = len(self.alibi.slopes) // heads
        return replace(self, alibi=self.alibi.of_heads(head * group, group))

    def _seen(self, view: RowMap, query_columns_BT: Tensor) -> Tensor | None:
        """Return which rows each query sees, bool [B or 1, M or 1, T, N], or None when all of them."""
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
        mask: Tensor | None = None
        if not self.is_plain:
            mask, seen = self._evaluate(view, query_columns_BT), rows
        else:
            seen = rows - total + start + queries
            if queries > 1:
                ones = torch.ones((queries, queries), dtype=torch.bool, device=view.live_BMW.device)
                mask = ones.tril()[None, None]
        if self.alibi is None:
            return mask, seen
        return self._biased(view if seen == rows else view.first(seen), mask), seen

    def _biased(self, view: RowMap, seen: Tensor | None) -> Tensor:
        """Return the bias of a view's rows, -inf where a query does not see them; `seen` may be about the newest."""
        assert self.alibi is not None
        counts_pads = self.alibi.counts_pads and self.pinned_shift_BP is None
        positions = view.columns_BMW if counts_pads else view.tokens_BMW
        bias_BQ1N = alibi_bias(self.alibi, positions, view.live_BMW, self.pinned_shift_BP)
        if seen is None:
            return bias_BQ1N
        if seen.shape[3] < view.width:
            seen = pad(seen, (view.width - seen.shape[3], 0), value=True)
        if 1 < seen.shape[1] < bias_BQ1N.shape[1]:
            seen = seen.repeat_interleave(bias_BQ1N.shape[1] // seen.shape[1], dim=1)
        return bias_BQ1N.masked_fill(~seen, float("-inf"))

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
        """Return the mask of all queries, or None."""
        return self.visibility.for_queries(self.view, self.columns_BW)

    def bias_bytes(self, batch: int, query_heads: int) -> int:
        """Return the bytes of all queries' masks where these are biases; of bool masks none are counted."""
        if self.visibility.alibi is None:
            return 0
        return 4 * batch * query_heads * self.columns_BW.shape[1] * self.view.width

    def block(self, start: int, stop: int) -> tuple[Tensor | None, int]:
        """Return the mask of queries `start` to `stop`, and how many of the first rows any of them sees."""
        total = self.columns_BW.shape[1]
        return self.visibility.for_block(self.view, self.columns_BW[:, start:stop], start, total)
