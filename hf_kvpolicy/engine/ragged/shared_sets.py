"""Packing the sets of rows that all heads of a layer share, chosen batch row by batch row.

Letters: n rows of one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from torch import Tensor

from ...storage import RaggedLayer, RowMap
from .layers import RaggedForward
from .owners import OwnerCandidates
from .pack import pack_owners

__all__ = ["SharedSets"]


class SharedSets(RaggedForward):
    """A forward that publishes layers packed anew, one set of rows for all heads of a layer."""

    @cached_property
    def packed_layers(self) -> dict[int, RaggedLayer]:
        """What was packed so far, by layer."""
        return {}

    def pack_sets(
        self, layer: int, candidates: OwnerCandidates, maps: Sequence[RowMap], chosen: Sequence[Tensor | None]
    ) -> None:
        """Pack the rows [n] that each batch row keeps in every head of a layer (all of them for None)."""
        owners = [index for index in chosen for _ in range(self.heads)]
        self.packed_layers[layer] = pack_owners(candidates, maps, owners, self.heads)

    def packed_in_order(self) -> tuple[RaggedLayer, ...]:
        """Return all layers."""
        return tuple(self.packed_layers[layer] for layer in range(self.runtime.geometry.num_layers))

    def fresh_buffers(self) -> list[Tensor]:
        """Return the tensors this forward made: packed layers, and grown buffers that still hold candidates."""
        packed = [tensor for layer, found in self.packed_layers.items() for tensor in self.made(layer, found.rows)]
        return packed + super().fresh_buffers()
