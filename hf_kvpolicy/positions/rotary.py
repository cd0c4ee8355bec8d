"""Shifting keys that already carry a rotation.

A rotary key at position p moved to p + s is the same key rotated by s: only the difference of positions enters
attention. Angles are computed in fp64 and applied in fp32, then cast back to the key's dtype.

Letters: B batch rows, S stored heads, P rows, D head dimension, R rotated channels (R <= D).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

__all__ = ["RotarySpec", "Shift", "shift_keys"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RotarySpec:
    """How one model rotates its keys, by the module's own inverse frequencies.

    A constant factor on cosine and sine (yarn) is part of a key that was rotated once, so a shift leaves it alone.
    """

    inverse_frequencies: Tensor  # [R / 2]
    # Whether neighbouring channels are paired; else the first half of the rotated channels with the second half.
    interleaved: bool = False
    # Which of the policy's layers rotate their keys at all; None for all of them.
    rotated_layers: tuple[bool, ...] | None = None
    # What the model multiplies cosine and sine with (yarn).
    amplitude: float = 1.0

    @property
    def rotated_channels(self) -> int:
        """Leading channels of a head that are rotated."""
        return 2 * self.inverse_frequencies.shape[0]

    def rotates(self, layer: int) -> bool:
        """Whether a layer's keys carry a position."""
        return self.rotated_layers is None or self.rotated_layers[layer]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shift:
    """Cosine and sine of a shift per batch row and pinned row, [B, 1, P, R], ready to apply in every layer."""

    cos_B1PR: Tensor
    sin_B1PR: Tensor
    interleaved: bool = False

    @classmethod
    def of(cls, shift_BP: Tensor, spec: RotarySpec) -> Shift:
        """Return the rotation by a whole number of positions per row."""
        frequencies = spec.inverse_frequencies.to(shift_BP.device, torch.float64)
        angles = shift_BP.double()[:, None, :, None] * frequencies
        angles = angles.repeat_interleave(2, dim=-1) if spec.interleaved else torch.cat([angles, angles], dim=-1)
        return cls(cos_B1PR=angles.cos().float(), sin_B1PR=angles.sin().float(), interleaved=spec.interleaved)

    @classmethod
    def to_positions(cls, positions_BP: Tensor, spec: RotarySpec) -> Shift:
        """Return the model's own rotation of keys at these positions: angles in fp32, as it computes them."""
        frequencies = spec.inverse_frequencies.to(positions_BP.device, torch.float32)
        angles = positions_BP.float()[:, None, :, None] * frequencies
        angles = angles.repeat_interleave(2, dim=-1) if spec.interleaved else torch.cat([angles, angles], dim=-1)
        cosine, sine = angles.cos() * spec.amplitude, angles.sin() * spec.amplitude
        return cls(cos_B1PR=cosine, sin_B1PR=sine, interleaved=spec.interleaved)

    def undone(self, spec: RotarySpec) -> Shift:
        """Return what takes keys rotated by this back to where they were."""
        scale = spec.amplitude**-2
        return replace(self, cos_B1PR=self.cos_B1PR * scale, sin_B1PR=self.sin_B1PR * -scale)

    def to(self, device: torch.device) -> Shift:
        """Return the shift on another device."""
        return replace(self, cos_B1PR=self.cos_B1PR.to(device), sin_B1PR=self.sin_B1PR.to(device))


def shift_keys(keys_BSPD: Tensor, shift: Shift) -> Tensor:
    """Return keys rotated by the shift; channels beyond the rotated ones pass through."""
    rotated = shift.cos_B1PR.shape[-1]
    part = keys_BSPD[..., :rotated].float()
    if shift.interleaved:
        swapped = torch.stack([-part[..., 1::2], part[..., 0::2]], dim=-1).flatten(-2)
    else:
        swapped = torch.cat([-part[..., rotated // 2 :], part[..., : rotated // 2]], dim=-1)
    turned = (part * shift.cos_B1PR + swapped * shift.sin_B1PR).to(keys_BSPD.dtype)
    return turned if rotated == keys_BSPD.shape[-1] else torch.cat([turned, keys_BSPD[..., rotated:]], dim=-1)
