"""Packing what stays of one layer, owner by owner, into buffers of its own.

Letters: O owners (b * S + s), n rows of one owner, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...storage import RaggedLayer, RaggedMap, RaggedRows, RowMap, growth_slots
from .owners import OwnerCandidates

__all__ = ["pack_owners"]


def pack_owners(
    candidates: OwnerCandidates, maps: Sequence[RowMap], chosen: Sequence[Tensor | None], heads: int
) -> RaggedLayer:
    """Return a layer of the chosen rows.

    Args:
        maps: every owner's candidates.
        chosen: per owner which of them stay, ascending; None where all do.
    """
    lengths = [table.width if index is None else index.shape[0] for index, table in zip(chosen, maps, strict=True)]
    like_keys, like_values = candidates.slots(0)
    rows = RaggedRows.allocate(like_keys, like_values, [growth_slots(n) for n in lengths], heads)
    numbers = []
    for owner, (index, table) in enumerate(zip(chosen, maps, strict=True)):
        keys, values = candidates.rows(owner)
        columns, tokens = table.columns_BMW[0, 0], table.tokens_BMW[0, 0]
        if index is not None:
            columns, tokens = columns.index_select(0, index), tokens.index_select(0, index)
            at = index.to(keys.device)
            keys, values = keys.index_select(0, at), values.index_select(0, at)
        packed_keys, packed_values = rows.owner(owner, lengths[owner])
        packed_keys.copy_(keys)
        packed_values.copy_(values)
        numbers.append((columns, tokens))
    return RaggedLayer(rows=rows, map=RaggedMap.of(numbers, heads))
