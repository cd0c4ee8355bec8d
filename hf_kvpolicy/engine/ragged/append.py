"""A ragged forward that drops nothing: every owner's new rows go into the slack behind its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...storage import RaggedLayer
from ..append import AppendStep
from .layers import RaggedForward

__all__ = ["RaggedAppendStep"]


class RaggedAppendStep(RaggedForward, AppendStep):
    """Appends rows to the tail; may keep a segment open whose selection comes later."""

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """Write behind the published rows. Attention reads the flat slots itself: no tensor shows them all at once."""
        self.place(layer, keys_BHTD, values_BHTD)
        return keys_BHTD, values_BHTD

    def placed(self) -> dict[str, Any]:
        """Return where rows lie now."""
        layers = range(self.runtime.geometry.num_layers)
        return {"ragged": tuple(RaggedLayer(rows=self.buffers[i], map=self.base(i)) for i in layers)}
