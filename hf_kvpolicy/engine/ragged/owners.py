"""One layer's candidates and queries, owner by owner: what was stored, what was appended, without pads.

Letters: O owners (b * S + s), B batch rows, S stored heads, W slots of a tail or held queries, n rows of one owner, D
head dimension, Q query heads, G query heads of one owner, T new tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ...masks import MaskRecord
from ...positions import AlibiSpec
from ...storage import RaggedMap, RaggedRows, RowMap
from ...weighting import Weighting
from ..queries import QueryWindow
from ..visibility import SeenRows, Visibility

__all__ = ["LiveTail", "OwnerCandidates", "OwnerQueries"]


class LiveTail:
    """The live rows of a tail [B, 1, W], per batch row; shared by all layers and heads."""

    def __init__(self, tail: RowMap) -> None:
        self.width = tail.width
        self._maps: list[RowMap] = []
        self._index: list[Tensor | None] = []
        full = tail.live_BMW.flatten(1).all(1).tolist()
        for row, is_full in enumerate(full):
            part = RowMap(
                columns_BMW=tail.columns_BMW[row : row + 1],
                tokens_BMW=tail.tokens_BMW[row : row + 1],
                live_BMW=tail.live_BMW[row : row + 1],
                ordered=True,
            )
            index = None if is_full else tail.live_BMW[row, 0].nonzero()[:, 0]
            self._maps.append(part if index is None else part.gathered(index[None, None], _true(index), ordered=True))
            self._index.append(index)

    def map_of(self, row: int) -> RowMap:
        """Return the live rows of one batch row, [1, 1, n]."""
        return self._maps[row]

    def count(self, row: int) -> int:
        """Return the number of live rows of one batch row."""
        return self._maps[row].width

    def slots(self, row: int) -> Tensor | None:
        """Return where one batch row's live rows lie in the tail, ascending; None when all slots are live."""
        return self._index[row]

    def index(self, row: int, base_rows: int) -> Tensor | None:
        """Return where an owner's live rows lie among its base rows and the tail; None when all slots are live."""
        index = self._index[row]
        if index is None:
            return None
        return torch.cat([torch.arange(base_rows, device=index.device), index + base_rows])


@dataclass(slots=True, kw_only=True, eq=False)
class OwnerCandidates:
    """The rows of one layer among which is chosen, owner by owner, ascending by token position."""

    # Keys and values [n, D] of an owner's base rows and all tail slots.
    slots: Callable[[int], tuple[Tensor, Tensor]]
    base: RaggedMap
    tail: LiveTail
    # Where they are stored; None for a first prompt, which is not.
    stored: RaggedRows | None = None

    def rows(self, owner: int) -> tuple[Tensor, Tensor]:
        """Return an owner's live keys and values, [n, D]."""
        keys, values = self.slots(owner)
        index = self.tail.index(owner // self.base.heads, self.base.lengths[owner])
        if index is None:
            return keys, values
        index = index.to(keys.device)
        return keys.index_select(0, index), values.index_select(0, index)

    def slots_of(self, owner: int, chosen: Tensor | None) -> Tensor:
        """Return in which slots an owner's chosen rows are stored, ascending (all of its live rows for None)."""
        rows = self.base.lengths[owner]
        index = self.tail.index(owner // self.base.heads, rows)
        if index is None:
            return torch.arange(rows + self.tail.width, device=self.base.device) if chosen is None else chosen
        return index if chosen is None else index.index_select(0, chosen)

    def maps(self) -> list[RowMap]:
        """Return every owner's live rows as a map [1, 1, n]."""
        heads = self.base.heads
        return [base.then(self.tail.map_of(owner // heads)) for owner, base in enumerate(self.base.owners())]


class OwnerQueries:
    """The observed queries of a segment without pads, per batch row, and the rule they see by."""

    def __init__(
        self,
        window: QueryWindow,
        record: MaskRecord,
        *,
        columns_after: int,
        changed_mask_BF: Tensor | None,
        scaling: float,
        weighting: Weighting,
        batch: int,
        alibi: AlibiSpec | None = None,
    ) -> None:
        # Of the layer in hand.
        self.scaling, self.weighting = scaling, weighting
        self._columns_after = columns_after
        self._index: list[Tensor | None] = [None] * batch
        self._columns: list[Tensor] = []
        self._visibility: list[Visibility] = []
        for row in range(batch):
            columns = window.columns_BW[row : row + 1] if window.columns_BW.shape[0] > 1 else window.columns_BW
            real = None if window.real_BW is None else window.real_BW.expand(batch, -1)[row]
            if real is not None and not bool(real.all()):
                index = self._index[row] = real.nonzero()[:, 0]
                columns = columns.index_select(1, index)
            mask = None if changed_mask_BF is None else changed_mask_BF[row : row + 1]
            self._columns.append(columns)
            self._visibility.append(
                Visibility(
                    record=record,
                    columns_after=columns_after,
                    dense=mask is None,
                    changed_mask_BF=mask,
                    alibi=alibi,
                )
            )

    def count(self, row: int) -> int:
        """Return how many queries of one batch row were observed."""
        return self._columns[row].shape[1]

    def of_owner(self, queries_BQWD: Tensor, row: int, head: int, heads: int) -> Tensor:
        """Return the queries [1, G, W, D] of one owner's query heads."""
        group = queries_BQWD.shape[1] // heads
        queries = queries_BQWD[row : row + 1, head * group : (head + 1) * group]
        index = self._index[row]
        return queries if index is None else queries.index_select(2, index.to(queries.device))

    def place(self, output_BTQD: Tensor, part_1WGD: Tensor, row: int, head: int, heads: int) -> None:
        """Write the output of one owner's query heads to the places of its queries; pads keep what they have."""
        tokens, group = output_BTQD.shape[1], output_BTQD.shape[2] // heads
        output_TGD = output_BTQD[row, :, head * group : (head + 1) * group]
        if self.count(row) == tokens:
            output_TGD.copy_(part_1WGD[0])
        else:
            place_W = self._columns[row][0] - (self._columns_after - tokens)
            output_TGD.index_copy_(0, place_W.to(output_TGD.device), part_1WGD[0])

    def seen(self, row: int, head: int, heads: int, view: RowMap) -> SeenRows:
        """Return which rows of one of so many stored heads these queries see."""
        visibility = self._visibility[row].of_owner(head, heads)
        return SeenRows(visibility=visibility, view=view, columns_BW=self._columns[row])


def _true(index: Tensor) -> Tensor:
    return torch.ones((1, 1, index.shape[0]), dtype=torch.bool, device=index.device)
