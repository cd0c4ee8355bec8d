"""Representation: what a stored row is."""

from .condensed import CondensedLayers, Encoding, sandwich_map
from .depth_pairs import DepthPairs, layer_pairs
from .rows import ORIGINAL_ROWS, RowRepresentation

__all__ = [
    "ORIGINAL_ROWS",
    "CondensedLayers",
    "DepthPairs",
    "Encoding",
    "RowRepresentation",
    "layer_pairs",
    "sandwich_map",
]
