"""Merging two vectors into one direction (MiniCache, arXiv 2405.14366, equations 2 and 3; section 0x0CF).

With unit vectors u0, u1 of the lower and the deeper layer, Omega their angle and t the interpolation:

    e  = sin((1 - t) Omega) / sin Omega * u0 + sin(t Omega) / sin Omega * u1
    x' = e / |e| * |x|          for the x of either layer

What is stored is e scaled to the longer of the two vectors and rounded to their dtype, and for each layer the factor
|x| / |e as stored| in fp32: two equal vectors are restored bit for bit, and no angle is needed. Where that
overflows the dtype, or a vector is not finite, the two count as opposite, which are never merged.

Letters: B batch rows, H KV heads, T rows, D head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = [
    "NEAR_ANTIPODAL",
    "NEAR_PARALLEL",
    "MergedRows",
    "angular_distance",
    "merge_block_rows",
    "merge_rows",
    "merge_workspace_bytes",
    "units",
]

# Normalized angular distances (Omega / pi) below which the direction is interpolated linearly, and above which it is
# ill-conditioned, so that such a pair is never merged.
NEAR_PARALLEL = 1e-6
NEAR_ANTIPODAL = 1.0 - 1e-3

# Numbers merged at once, and how many fp32 tensors of that size are alive meanwhile.
_BLOCK_ELEMENTS = 1 << 18
_WORKSPACE_TENSORS = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MergedRows:
    """Rows of two layers merged, and how far apart they were."""

    shared_BHTD: Tensor  # dtype of the rows
    # What a shared row is multiplied with to have the length of the lower and of the deeper layer's row, fp32.
    magnitudes_2BHT: Tensor
    # Omega / pi, in [0, 1], fp32; 1 where there is nothing finite to store.
    distances_BHT: Tensor


def merge_block_rows(rows_BHTD: Tensor) -> int:
    """Return how many rows of an owner are merged at once, so that the workspace does not grow with the prompt."""
    batch, heads, _, dim = rows_BHTD.shape
    return max(1, _BLOCK_ELEMENTS // max(1, batch * heads * dim))


def merge_workspace_bytes(rows_BHTD: Tensor) -> int:
    """Return the bytes alive beside its result while rows shaped like these are merged block by block."""
    batch, heads, tokens, dim = rows_BHTD.shape
    block = min(tokens, merge_block_rows(rows_BHTD))
    return batch * heads * (_WORKSPACE_TENSORS * block * dim + tokens) * 4


def units(lower_BHTD: Tensor, deeper_BHTD: Tensor) -> tuple[Tensor, Tensor]:
    """Return both directions, fp32 (fp64 for fp64 rows); a vector of length zero takes the other's direction."""
    wide = torch.promote_types(lower_BHTD.dtype, torch.float32)
    lower, deeper = (_unit(rows.to(wide)) for rows in (lower_BHTD, deeper_BHTD))
    no_lower, no_deeper = (~rows.any(-1, keepdim=True) for rows in (lower_BHTD, deeper_BHTD))
    return torch.where(no_lower, deeper, lower), torch.where(no_deeper, lower, deeper)


def angular_distance(lower_BHTD: Tensor, deeper_BHTD: Tensor) -> Tensor:
    """Return Omega / pi of two rows of unit vectors, [B, H, T].

    By half-angles: an arc cosine cannot tell small angles from none.
    """
    apart = torch.linalg.vector_norm(lower_BHTD - deeper_BHTD, dim=-1)
    together = torch.linalg.vector_norm(lower_BHTD + deeper_BHTD, dim=-1)
    return 2.0 * torch.atan2(apart, together) / torch.pi


def merge_rows(lower_BHTD: Tensor, deeper_BHTD: Tensor, interpolation: float) -> MergedRows:
    """Merge rows of a lower and a deeper layer; `interpolation` 0 is the lower's direction, 1 the deeper's."""
    lower, deeper = units(lower_BHTD, deeper_BHTD)
    distances = angular_distance(lower, deeper)
    angle = (distances * torch.pi)[..., None]
    straight = (distances < NEAR_PARALLEL) | (distances > NEAR_ANTIPODAL)
    sine = torch.where(straight[..., None], 1.0, angle.sin())
    curved = (((1.0 - interpolation) * angle).sin() * lower + (interpolation * angle).sin() * deeper) / sine
    direction = torch.where(straight[..., None], torch.lerp(lower, deeper, interpolation), curved)
    lengths = torch.stack([_length(rows.to(direction.dtype)) for rows in (lower_BHTD, deeper_BHTD)])
    shared = (_unit(direction) * lengths.amax(0)[..., None]).to(lower_BHTD.dtype)
    stored = _length(shared.to(direction.dtype))
    magnitudes = torch.where(stored > 0, lengths / stored.clamp(min=torch.finfo(stored.dtype).tiny), 0.0)
    distances = torch.where(stored.isfinite() & lengths.isfinite().all(0), distances, 1.0)
    return MergedRows(shared_BHTD=shared, magnitudes_2BHT=magnitudes.float(), distances_BHT=distances.float())


def _length(rows: Tensor) -> Tensor:
    """Return Euclidean lengths without overflow or underflow of the squares."""
    largest = rows.abs().amax(-1)
    scale = torch.where(largest > 0, largest, 1.0)
    lengths: Tensor = torch.linalg.vector_norm(rows / scale[..., None], dim=-1) * scale
    return lengths


def _unit(rows: Tensor) -> Tensor:
    length = _length(rows)[..., None]
    return rows / torch.where(length > 0, length, 1.0)
