"""What selections over ragged rows share: their face to a forward, and packing the rows that stay.

Letters: O owners (b * S + s), S stored heads, W held queries, Q query heads, D head dimension, n rows of one owner, X
state channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...storage import RaggedLayer, RaggedMap, RaggedRows, RowMap, growth_slots
from .owners import OwnerCandidates, OwnerQueries

__all__ = ["OwnerDecider", "pack_owners"]


class OwnerDecider(ABC):
    """One selection over all layers, owner by owner."""

    # What was packed so far, by layer.
    layers: dict[int, RaggedLayer]
    # Bytes of candidates held until the last layer is seen, and of scoring one owner.
    held_bytes: int = 0
    workspace_bytes: int = 0

    @property
    @abstractmethod
    def observes(self) -> bool:
        """Whether the selection must see queries."""

    @property
    @abstractmethod
    def drops_rows(self) -> bool:
        """Whether an owner lost a row; asked when the selection is complete."""

    @abstractmethod
    def observe(
        self, layer: int, candidates: OwnerCandidates, queries_BQWD: Tensor | None, seen: OwnerQueries | None
    ) -> None:
        """Score one layer and, unless something must see all layers first, choose and pack its rows."""

    @abstractmethod
    def finish(self, num_layers: int) -> tuple[RaggedLayer, ...]:
        """Complete the selection and return all layers.

        Raises:
            SelectionError: a score is not finite; the model's activations are broken.
        """

    def decided(self) -> dict[str, Any]:
        """Return what else was decided, as fields of a snapshot."""
        return {}


def pack_owners(
    candidates: OwnerCandidates,
    maps: Sequence[RowMap],
    chosen: Sequence[Tensor | None],
    heads: int,
    states: Sequence[Tensor] | None = None,
) -> RaggedLayer:
    """Return a layer of each owner's chosen rows (all of them for None) and their states [n, X], in fresh buffers."""
    numbers, kept_states = [], []
    for owner, (index, table) in enumerate(zip(chosen, maps, strict=True)):
        columns, tokens = table.columns_BMW[0, 0], table.tokens_BMW[0, 0]
        state = None if states is None else states[owner]
        if index is not None:
            columns, tokens = columns.index_select(0, index), tokens.index_select(0, index)
            state = None if state is None else state.index_select(0, index.to(state.device))
        numbers.append((columns, tokens))
        if state is not None:
            kept_states.append(state.to(columns.device))
    packed = RaggedMap.of(numbers, heads, kept_states if states is not None else None)
    stored = candidates.stored
    if stored is not None and stored.coded_slots:
        # What lies in blocks stays there; a copy would have to be coded once more.
        slots = [candidates.slots_of(owner, index) for owner, index in enumerate(chosen)]
        return RaggedLayer(rows=stored.taken(torch.cat(slots), packed.lengths), map=packed)
    return RaggedLayer(rows=_copied(candidates, chosen, packed), map=packed)


def _copied(candidates: OwnerCandidates, chosen: Sequence[Tensor | None], table: RaggedMap) -> RaggedRows:
    """Copy each owner's chosen rows (all of them for None) into fresh buffers."""
    rows = RaggedRows.allocate(*candidates.slots(0), [growth_slots(n) for n in table.lengths], table.heads)
    for owner, (index, length) in enumerate(zip(chosen, table.lengths, strict=True)):
        keys, values = candidates.rows(owner)
        if index is not None:
            at = index.to(keys.device)
            keys, values = keys.index_select(0, at), values.index_select(0, at)
        for into, part in zip(rows.owner(owner, length), (keys, values), strict=True):
            into.copy_(part)
    return rows
