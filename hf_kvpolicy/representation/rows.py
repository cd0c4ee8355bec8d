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


ORIGINAL_ROWS = RowRepresentation(name="original_kv_rows", replaces_rows=False)
