"""Where the parts of a snapshot lie, and moving them: to the CPU while a cache is idle, and back.

What belongs to one layer (K/V buffers, pristine keys, held queries) moves with that layer. What layers share (maps,
carried scores, the mask of columns) leaves with the last layer and comes back with the first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from ..storage import DenseRows, RaggedRows

__all__ = ["OFFLOAD_DEVICE", "Moves", "Placement"]

OFFLOAD_DEVICE = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The devices of one snapshot."""

    # Each layer's buffers and held queries.
    layers: tuple[torch.device, ...]
    # Each map of first slots: one, or one per layer.
    maps: tuple[torch.device, ...]
    # The tail's map, carried scores, the mask of columns, which queries are held.
    shared: torch.device

    def all_on(self, device: torch.device) -> Placement:
        """Return the placement of everything on one device."""
        return Placement(layers=(device,) * len(self.layers), maps=(device,) * len(self.maps), shared=device)

    def without(self, layer: int | None, device: torch.device) -> Placement:
        """Return the placement once a layer, or every layer, has left for a device."""
        left = tuple(device if layer in (None, i) else here for i, here in enumerate(self.layers))
        return self.all_on(device) if set(left) == {device} else replace(self, layers=left)

    def back(self, layer: int | None, home: Placement) -> Placement:
        """Return the placement once a layer, or every layer, has come home."""
        pairs = zip(self.layers, home.layers, strict=True)
        return replace(home, layers=tuple(its if layer in (None, i) else here for i, (here, its) in enumerate(pairs)))


class _Movable(Protocol):
    def to(self: _Part, device: torch.device, /) -> _Part: ...


_Part = TypeVar("_Part", bound=_Movable)


class Moves:
    """Moves parts of snapshots, each once: what the published and the waiting snapshot share stays shared."""

    def __init__(self) -> None:
        # The part itself is kept, so that no other object can take its identity.
        self._done: dict[tuple[int, torch.device], tuple[_Movable, _Movable]] = {}

    def __call__(self, part: _Part, device: torch.device) -> _Part:
        """Return a tensor, map or layer's rows on a device."""
        key = (id(part), device)
        if key not in self._done:
            moved: _Movable
            if isinstance(part, DenseRows | RaggedRows) and part.device != device:
                # Stores share tensors: pristine keys, blocks of coded rows.
                moved = part.of([self(tensor, device) for tensor in part.tensors()])
            else:
                moved = part.to(device)
            self._done[key] = (part, moved)
        return self._done[key][1]  # type: ignore[return-value]
