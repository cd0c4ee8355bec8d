"""Rows in few bits: how many, in blocks of how many rows (section 0x0DD; arithmetic in `storage/codes.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from .rows import RowRepresentation

__all__ = ["PRECISIONS", "QuantizedRows"]

# What a user names, and its bits.
PRECISIONS = {"int8": 8, "int4": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedRows(RowRepresentation):
    """Original rows, the older ones coded: keys per channel in blocks of rows, values per row.

    Attributes:
        bits: of a code, 8 or 4.
        block_rows: rows of a block; as many of the newest rows, and fewer than twice as many, are held as they are.
    """

    bits: int
    block_rows: int
