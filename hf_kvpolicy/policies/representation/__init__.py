"""Policies that change what a stored row is."""

from .layer_condensed import LayerCondensedCache
from .minicache import MiniCache

__all__ = ["LayerCondensedCache", "MiniCache"]
