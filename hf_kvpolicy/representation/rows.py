"""What a stored row is. Original rows are a key and a value as the checkpoint produced them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ORIGINAL_ROWS", "RowRepresentation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowRepresentation:
    """Names one stored object for manifests and backend admission."""

    name: str
    replaces_rows: bool
    # Whether rows are coded in few bits (`quantized.py`).
    quantizes: bool = False

    @property
    def kind(self) -> str | None:
        """Which kind of replacement it is (`contract.REPLACEMENT_KINDS`); None for original rows."""
        return None

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


ORIGINAL_ROWS = RowRepresentation(name="original_kv_rows", replaces_rows=False)
