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
        """Write behind the published rows; attention reads the flat slots (a first prompt its own rows)."""
        rows = self.place(layer, keys_BHTD, values_BHTD)
        return (rows.keys_ND, rows.values_ND) if self.snapshot.frontier.columns else (keys_BHTD, values_BHTD)

    def placed(self) -> dict[str, Any]:
        """Return where rows lie now."""
        before = self.snapshot.ragged
        return {
            "ragged": tuple(
                # Every layer has a map of its own, also while it is empty: the ledger counts one each.
                RaggedLayer(rows=self.buffers[i], map=before[i].map if before else self.nothing())
                for i in range(self.runtime.geometry.num_layers)
            )
        }
