"""Policies that change what a stored row is."""

from .minicache import MiniCache

__all__ = ["MiniCache"]
