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

    def _states_after(self) -> Tensor | None:
        """Return the scores of answers that go on: a segment that is appended settles the answer before it."""
        return self.snapshot.scores_without(self.inputs.brought)

    def placed(self) -> dict[str, Any]:
        """Return where rows lie now."""
        layers, old = range(self.runtime.geometry.num_layers), self.snapshot.ragged
        # Each layer has tensors of its own, which the ledger charges one by one.
        maps = [old[i].map if old else self.nothing() for i in layers]
        return {"ragged": tuple(RaggedLayer(rows=self.buffers[i], map=maps[i]) for i in layers)}
