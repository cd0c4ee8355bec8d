"""What ragged forwards that select at their end share: where a prompt competes, and what is published.

Letters: B batch rows, H KV heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from ...storage import RaggedLayer
from ..snapshot import Snapshot
from .layers import RaggedForward

__all__ = ["RaggedSelection"]


class RaggedSelection(RaggedForward):
    """Attends over published and new rows, then every owner keeps its best."""

    # Rows per owner and batch row; None for a policy without a budget.
    budget_rows: tuple[int, ...] | None

    def append(self, layer: int, keys_BHTD: Tensor, values_BHTD: Tensor) -> tuple[Tensor, Tensor]:
        """A first prompt stays where it is; a later one goes behind the published rows for the time of attention."""
        if self.snapshot.frontier.columns:
            self.place(layer, keys_BHTD, values_BHTD)
        return keys_BHTD, values_BHTD

    def selected(self, layers: tuple[RaggedLayer, ...], *, drops_rows: bool, **decided: Any) -> Snapshot:
        """Return the snapshot in which every owner holds what was chosen for it, and what else was decided."""
        frontier = self.inputs.frontier_after
        return replace(
            self.snapshot,
            generations=self.transaction.successor,
            frontier=frontier,
            ragged=layers,
            **decided,
            tail=None,
            tail_counts=(0,) * self.inputs.batch,
            budget_rows=self.budget_rows,
            segment_tokens=self.snapshot.ended(frontier.tokens, self.inputs.brought),
            open_segment=None,
            last_was_segment=self.inputs.length > 1,
            decision_epoch=self.snapshot.decision_epoch + 1,
            evicted_at_column=frontier.columns if drops_rows else self.snapshot.evicted_at_column,
        )
