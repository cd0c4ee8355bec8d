"""Positions: what a stored key's rotation, or its distance, means to a query."""

from .alibi import AlibiSpec, alibi_bias, alibi_bias_of_owners, alibi_bias_reference, alibi_in
from .cache_local import local_shift, local_shift_reference
from .rotary import RotarySpec, Shift, shift_keys

__all__ = [
    "AlibiSpec",
    "RotarySpec",
    "Shift",
    "alibi_bias",
    "alibi_bias_of_owners",
    "alibi_bias_reference",
    "alibi_in",
    "local_shift",
    "local_shift_reference",
    "shift_keys",
]
