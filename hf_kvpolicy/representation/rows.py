"""What a stored row is. Original rows are a key and a value as the checkpoint produced them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["ORIGINAL_ROWS", "RowRepresentation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRepresentation:
    """Names one stored object for manifests and backend admission."""

    name: str
    replaces_rows: bool
    # Whether rows are coded in few bits (`quantized.py`).
    quantizes: bool = False
    # What the config of the checkpoint it was read from says of its training; None where any checkpoint will do.
    training: Mapping[str, object] | None = field(default=None, compare=False)

    @property
    def kind(self) -> str | None:
        """Which kind of replacement it is (`contract.REPLACEMENT_KINDS`); None for original rows."""
        return None

    @property
    def merges(self) -> bool:
        """Whether rows are merged as they come, so that some cannot be recovered."""
        return False

    @property
    def has_own_step(self) -> bool:
        """Whether its forwards are a kind of step of their own."""
        return self.replaces_rows

    @property
    def unit(self) -> str | None:
        """What shares a row beside the unit of selection; None where nothing does."""
        return None

    @property
    def storage(self) -> str:
        """What the rows lie in."""
        return "dense"

    @property
    def leaves_forward(self) -> bool:
        """Whether a prompt attends over its own rows as they are, as it would without a cache."""
        return True

    @property
    def unrotates_keys(self) -> bool:
        """Whether keys are turned back to what they were before their rotation."""
        return False


ORIGINAL_ROWS = RowRepresentation(name="original_kv_rows", replaces_rows=False)
