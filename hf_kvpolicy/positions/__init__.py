"""Positions: what a stored key's rotation means to a query."""

from .cache_local import local_shift, local_shift_reference
from .rotary import RotarySpec, Shift, shift_keys

__all__ = ["RotarySpec", "Shift", "local_shift", "local_shift_reference", "shift_keys"]
