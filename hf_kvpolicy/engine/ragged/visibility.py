"""Masks of one forward over ragged rows: per owner, and none where every query sees every row.

Letters: B batch rows, S stored heads, O owners, T queries, W tail slots, N rows of all owners, n rows of one owner.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...masks import MaskRecord
from ...storage import RaggedMap, RowMap

__all__ = ["RaggedVisibility"]


class RaggedVisibility:
    """The masks of one forward under one rule. The tail's part is made once and shared by all layers and heads."""

    def __init__(
        self,
        record: MaskRecord,
        tail: RowMap,
        query_columns_BT: Tensor,
        *,
        columns_after: int,
        changed_mask_BF: Tensor | None,
        is_full: bool,
    ) -> None:
        """Prepare masks.

        Args:
            tail: every appended row, this forward's own last; [B, 1, W].
            query_columns_BT: columns of this forward's queries, [1 or B, T].
            is_full: no slot of the tail is dead (known on the host).
        """
        self._record, self._changed = record, changed_mask_BF
        self._queries = query_columns_BT.long()[:, None, :, None]
        # Base rows are older than every query, so plain causality shows all of them.
        self._shows_base = changed_mask_BF is None and record.is_causal_for(columns_after)
        # The newest query alone sees everything: the hot path asks the device for nothing.
        plain = self._shows_base and is_full and query_columns_BT.shape[1] == 1
        self._tail: list[Tensor | None] = [None] * tail.live_BMW.shape[0] if plain else self._tail_masks(tail)
        self._is_plain = self._shows_base and all(part is None for part in self._tail)
        self._width = tail.width

    def masks(self, base: RaggedMap) -> list[Tensor | None] | None:
        """Return per owner which of its base rows and tail slots each query sees, bool [T, n]; None where all do."""
        if self._is_plain:
            return None
        found: list[Tensor | None] = []
        shown = [None] * len(base.lengths) if self._shows_base else self._base_masks(base)
        for owner, (rows, seen) in enumerate(zip(base.lengths, shown, strict=True)):
            tail = self._tail[owner // base.heads]
            if seen is None and tail is None:
                found.append(None)
                continue
            queries, device = self._queries.shape[2], self._queries.device
            if seen is None:
                seen = torch.ones((queries, rows), dtype=torch.bool, device=device)
            if tail is None:
                tail = torch.ones((queries, self._width), dtype=torch.bool, device=device)
            found.append(torch.cat([seen, tail], dim=1))
        return found

    def _tail_masks(self, tail: RowMap) -> list[Tensor | None]:
        allowed = self._record.allows(self._queries, tail.columns_BMW.long()[:, :, None, :])
        allowed = allowed & tail.live_BMW[:, :, None, :]
        if self._changed is not None:
            allowed = allowed & self._current(tail.columns_BMW[:, 0])[:, None, None, :]
        full = allowed.flatten(1).all(1).tolist()
        return [None if is_full else allowed[row, 0] for row, is_full in enumerate(full)]

    def _base_masks(self, base: RaggedMap) -> list[Tensor | None]:
        """Evaluate the rule once over the rows of all owners of the layer."""
        columns_N = base.ordered().columns_P.long()
        rows = base.batch_size
        per_row = [sum(base.lengths[b * base.heads : (b + 1) * base.heads]) for b in range(rows)]
        queries = [self._queries] * rows if self._queries.shape[0] == 1 else list(torch.split(self._queries, 1))
        seen_TN = torch.cat(
            [
                self._record.allows(columns, part[None, None, None, :])[0, 0]
                for columns, part in zip(queries, torch.split(columns_N, per_row), strict=True)
            ],
            dim=1,
        )
        if self._changed is not None:
            owner_rows = torch.arange(rows, device=columns_N.device).repeat_interleave(
                torch.tensor(per_row, device=columns_N.device)
            )
            seen_TN = seen_TN & self._changed[owner_rows, columns_N.clamp(max=self._changed.shape[1] - 1)]
        return list(torch.split(seen_TN, list(base.lengths), dim=1))

    def _current(self, columns_BW: Tensor) -> Tensor:
        assert self._changed is not None
        return self._changed.gather(1, columns_BW.long().clamp(0, self._changed.shape[1] - 1))
