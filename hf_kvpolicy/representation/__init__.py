"""Representation: what a stored row is."""

from .depth_pairs import DepthPairs, layer_pairs
from .rows import ORIGINAL_ROWS, RowRepresentation

__all__ = ["ORIGINAL_ROWS", "DepthPairs", "RowRepresentation", "layer_pairs"]
