"""Seeded random scores: a stateless hash of (seed, layer, head, token position).

No batch index enters, so a padded row equals the same row alone, beams agree and forks repeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .base import LayerObservation

__all__ = ["SeededRandom", "hash_unit_reference", "mix_bits", "unit_interval"]

# Multipliers of a 31-bit integer finaliser. Products stay below 2^62, so int64 arithmetic is exact on every device.
_MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39)
_MASK = 0x7FFFFFFF


@dataclass(frozen=True, slots=True, kw_only=True)
class SeededRandom:
    """Uniform scores in [0, 1), fixed by the seed."""

    seed: int
    name: str = "random"
    window_queries: int = 0
    differs_by_layer: bool = True

    def votes(self, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        """Return hashed scores [B, S, N] fp32."""
        heads = seen.first_head + torch.arange(score_heads, device=seen.tokens_BMN.device).view(1, -1, 1)
        state = mix_bits(seen.tokens_BMN.long() + 1)
        state = mix_bits(state ^ mix_bits(heads + 1 + 0x10001 * (seen.layer + 1)))
        return unit_interval(mix_bits(state ^ mix_bits(torch.tensor(self.seed, device=state.device))))

    def refine(self, votes_BMN: Tensor) -> Tensor:
        """Return the votes unchanged."""
        return votes_BMN

    def describe(self) -> dict[str, Any]:
        """Return the seed."""
        return {"seed": self.seed}


def unit_interval(bits: Tensor) -> Tensor:
    """Map hashed bits to fp32 in [0, 1]."""
    return bits.float() / float(_MASK + 1)


def mix_bits(value: Tensor) -> Tensor:
    """Hash integers to 31 bits each, exactly the same on every device."""
    value = value & _MASK
    for multiplier in _MULTIPLIERS:
        value = ((value ^ (value >> 15)) * multiplier) & _MASK
    return value ^ (value >> 15)


def hash_unit_reference(seed: int, layer: int, head: int, token: int) -> float:
    """Plain oracle of one score, in Python integers."""

    def mix(value: int) -> int:
        value &= _MASK
        for multiplier in _MULTIPLIERS:
            value = ((value ^ (value >> 15)) * multiplier) & _MASK
        return value ^ (value >> 15)

    state = mix(mix(token + 1) ^ mix(head + 1 + 0x10001 * (layer + 1)))
    return float(torch.tensor(mix(state ^ mix(seed & _MASK))).float() / float(_MASK + 1))
