"""Policies that change what a stored row is."""

from .dmc import DMCCache
from .layer_condensed import LayerCondensedCache
from .minicache import MiniCache

__all__ = ["DMCCache", "LayerCondensedCache", "MiniCache"]
