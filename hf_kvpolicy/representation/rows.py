"""What a stored row is. Original rows are a key and a value as the checkpoint produced them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..contract import ORIGINAL, admit_checkpoint, trained_rows

__all__ = ["ORIGINAL_ROWS", "RowRepresentation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRepresentation:
    """Names one stored object for manifests and backend admission."""

    name: str
    replaces_rows: bool

    @property
    def keeps_forward(self) -> bool:
        """Whether a prompt's forward is the model's own, whose rows are only stored in another way."""
        return True

    @property
    def merges(self) -> bool:
        """Whether rows are merged as they come, so that some cannot be recovered."""
        return False

    @property
    def unit(self) -> str | None:
        """What one decision is about, where that follows from the representation."""
        return None

    def admit(self, trained: Any) -> None:
        """Refuse a checkpoint whose rows are not these.

        Args:
            trained: `kvpolicy` of its config; None for an ordinary checkpoint.

        Raises:
            CheckpointAdmissionError: the checkpoint was trained for other rows, or not for these.
        """
        admit_checkpoint(self.name, trained_rows(trained))


ORIGINAL_ROWS = RowRepresentation(name=ORIGINAL, replaces_rows=False)
