"""Representation: what a stored row is."""

from .rows import ORIGINAL_ROWS, RowRepresentation

__all__ = ["ORIGINAL_ROWS", "RowRepresentation"]
