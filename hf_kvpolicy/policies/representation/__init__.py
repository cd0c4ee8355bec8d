"""Policies that change what a stored row is."""

from .dmc import DMCCache
from .minicache import MiniCache

__all__ = ["DMCCache", "MiniCache"]
