"""Numbers in few bits: codes, scales and zeros of blocks of rows.

A number x of a group is stored as the signed integer c = round((x - zero) / scale) and read as zero + scale * c. Keys
share scale and zero along a block's rows, so each channel has its own range; values share them along their channels, so
each row has (Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", arXiv 2402.02750, section 3).
The scale covers the group's range from the zero that is stored, so no code is clipped and x is off by half a scale at
most, and by the rounding of the result into the rows' dtype.

A number that is not finite widens no range: it is a *void*, read as NaN, and the others of its group are off by half a
scale as ever. The scale of a group with voids is stored negative; the lowest code is left to them there.

Letters: B batch rows, S stored heads, N blocks, G rows of a block, D head dimension, X bytes of a row's codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dense import stored_tensors

__all__ = ["CHANNEL_AXIS", "CODE_BITS", "ROW_AXIS", "CodedTensor", "code_bytes", "in_blocks"]

CODE_BITS = (8, 4)
# The axis that shares a scale: a block's rows for keys, a row's channels for values.
ROW_AXIS, CHANNEL_AXIS = -2, -1


def code_bytes(dim: int, bits: int) -> int:
    """Return the bytes of one row's codes: a byte each, or two 4-bit codes a byte."""
    return dim if bits == 8 else -(-dim // 2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CodedTensor:
    """Keys, or values, of N blocks of one layer. Immutable: a block is never written once it is made."""

    # int8; at 4 bits the first half of the channels lies in the low nibbles, the second in the high ones.
    codes_BSNGX: Tensor
    # [B, S, N, 1, D] where a block's rows share them, [B, S, N, G, 1] where a row's channels do; in the rows' dtype.
    scales: Tensor
    zeros: Tensor
    bits: int
    dim: int
    axis: int
    # Whether some group may have a void.
    has_voids: bool

    @classmethod
    def encode(cls, rows_BSNGD: Tensor, live_BSNG: Tensor, *, bits: int, axis: int) -> CodedTensor:
        """Code blocks of rows; what lies in a dead slot widens no range and is coded as 0."""
        dtype, live = rows_BSNGD.dtype, live_BSNG[..., None]
        wide = torch.promote_types(dtype, torch.float32)
        with stored_tensors():
            numbers = rows_BSNGD.to(wide)
            void = live & ~numbers.isfinite()
            # Asked of the device once, so that reading takes another path only where there are any.
            has_voids = bool(void.any())
            known = live & ~void
            low = torch.where(known, numbers, torch.inf).amin(axis, keepdim=True)
            high = torch.where(known, numbers, -torch.inf).amax(axis, keepdim=True)
            empty = low > high
            low, high = low.masked_fill(empty, 0.0), high.masked_fill(empty, 0.0)
            lowest, highest = _extremes(bits)
            scales, zeros = _ranges(low, high, (lowest, highest), dtype)
            if has_voids:
                beside = _ranges(low, high, (lowest + 1, highest), dtype)
                is_beside = void.any(axis, keepdim=True)
                # Of a group whose numbers are equal, too, the scale has a sign.
                sized = torch.where(beside[0] > 0, beside[0], torch.finfo(dtype).smallest_normal)
                scales, zeros = torch.where(is_beside, -sized, scales), torch.where(is_beside, beside[1], zeros)
            codes = _codes(numbers, scales.to(wide), zeros.to(wide), bits)
            codes = torch.where(live, codes.masked_fill(void, lowest), 0.0).to(torch.int8)
            packed = codes if bits == 8 else _packed(codes)
        dim = rows_BSNGD.shape[-1]
        return cls(codes_BSNGX=packed, scales=scales, zeros=zeros, bits=bits, dim=dim, axis=axis, has_voids=has_voids)

    @property
    def blocks(self) -> int:
        """Blocks of each owner."""
        return self.codes_BSNGX.shape[2]

    @property
    def block_rows(self) -> int:
        """Rows of a block."""
        return self.codes_BSNGX.shape[3]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row: its codes, and its scale and zero where it has its own."""
        own_bytes = 2 * self.scales.element_size() if self.axis == CHANNEL_AXIS else 0
        return self.codes_BSNGX.shape[4] + own_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block beside its rows: scales and zeros that these share."""
        return 2 * self.dim * self.scales.element_size() if self.axis == ROW_AXIS else 0

    def decode(self, out_BSNGD: Tensor) -> None:
        """Write the numbers of all blocks, rounded once into the dtype of what they are written to."""
        half = self.codes_BSNGX.shape[4]
        void_code = _extremes(self.bits)[0] if self.has_voids else None
        if self.bits == 8:
            _scaled(self.codes_BSNGX, self.zeros, self.scales, out_BSNGD, void_code)
            return
        # Shifting left and back gives the low nibble its sign.
        parts = ((self.codes_BSNGX << 4) >> 4, self.codes_BSNGX >> 4)
        for codes, channels in zip(parts, (slice(0, half), slice(half, self.dim)), strict=True):
            own = channels if self.axis == ROW_AXIS else slice(None)
            out = out_BSNGD[..., channels]
            _scaled(codes[..., : out.shape[-1]], self.zeros[..., own], self.scales[..., own], out, void_code)

    def decoded(self) -> Tensor:
        """Return the numbers of all blocks, [B, S, N, G, D]."""
        rows = self.zeros.new_empty((*self.codes_BSNGX.shape[:4], self.dim))
        self.decode(rows)
        return rows

    def then(self, other: CodedTensor) -> CodedTensor:
        """Return these blocks followed by others."""
        parts = zip(self.tensors(), other.tensors(), strict=True)
        return self.of([torch.cat(part, dim=2) for part in parts], has_voids=other.has_voids)

    def chosen(self, block_BSN: Tensor) -> CodedTensor:
        """Return some blocks of each owner, in this order."""
        index = block_BSN[:, :, :, None, None]
        return self.of([part.gather(2, index.expand(-1, -1, -1, *part.shape[3:])) for part in self.tensors()])

    def of(self, tensors: Sequence[Tensor], *, has_voids: bool = False) -> CodedTensor:
        """Return blocks of these codes, scales and zeros; `has_voids` says it of those that are not of this object."""
        codes, scales, zeros = tensors
        has_voids = self.has_voids or has_voids
        return replace(self, codes_BSNGX=codes, scales=scales, zeros=zeros, has_voids=has_voids)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        return self.codes_BSNGX, self.scales, self.zeros


def in_blocks(part_BSWx: Tensor, block_rows: int) -> Tensor:
    """Return slots of whole blocks as a view [B, S, N, G, ...]."""
    shape = part_BSWx.shape
    return part_BSWx.view(*shape[:2], -1, block_rows, *shape[3:])


def _extremes(bits: int) -> tuple[int, int]:
    return -(1 << (bits - 1)), (1 << (bits - 1)) - 1


def _ranges(low: Tensor, high: Tensor, codes: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scales and zeros, in the rows' dtype, that reach from the lowest number of a group to its highest."""
    lowest, highest = codes
    levels, limits = highest - lowest, torch.finfo(dtype)
    step = high / levels - low / levels
    # The codes' middle is -1/2, or 0 beside voids.
    zeros = (low / 2 + high / 2 - step * ((lowest + highest) / 2)).to(dtype)
    stored = zeros.to(low.dtype)
    reach = torch.maximum((high - stored) / highest, (stored - low) / -lowest)
    # Rounded into the dtype it must not be shorter, subnormal or not.
    margin = limits.eps + 4 * torch.finfo(low.dtype).eps
    scales = (reach * (1 + margin) + limits.smallest_normal * limits.eps).to(dtype)
    return torch.where(reach > 0, scales, 0.0).to(dtype), zeros


def _codes(numbers: Tensor, scales: Tensor, zeros: Tensor, bits: int) -> Tensor:
    """Return codes as whole floats; those of voids mean nothing."""
    lowest, highest = _extremes(bits)
    codes = ((numbers - zeros) / torch.where(scales == 0, 1.0, scales.abs())).round().clamp(lowest, highest)
    return torch.where(scales < 0, codes.clamp(min=lowest + 1), codes)


def _packed(codes_BSNGD: Tensor) -> Tensor:
    dim = codes_BSNGD.shape[-1]
    half = code_bytes(dim, 4)
    low, high = codes_BSNGD[..., :half], codes_BSNGD[..., half:]
    if dim % 2:
        high = torch.nn.functional.pad(high, (0, 1))
    return (low & 15) | (high << 4)


def _scaled(codes: Tensor, zeros: Tensor, scales: Tensor, out: Tensor, void_code: int | None) -> None:
    out.copy_(codes)
    torch.addcmul(zeros, out, scales if void_code is None else scales.abs(), out=out)
    if void_code is not None:
        out.masked_fill_((scales < 0) & (codes == void_code), torch.nan)
