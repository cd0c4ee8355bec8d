"""Which prompt rows a cache holds, found by its keys, and how far two caches hold the same.

Letters: L layers, H KV heads, N rows of the prompt, K rows kept, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

# Two attention functions round differently, and upper layers inherit it; different rows lie far further apart.
TOLERANCE = 1e-3


def find_rows(kept_HKD: Tensor, dense_HND: Tensor) -> Tensor:
    """The prompt row that each kept key is, int64 [H, K], in the order of the kept ones.

    Raises:
        ValueError: a key is not one of the prompt's, or two are the same one.
    """
    kept, dense = kept_HKD.double(), dense_HND.double()
    squared_HKN = kept.square().sum(-1)[:, :, None] + dense.square().sum(-1)[:, None] - 2 * kept @ dense.transpose(1, 2)
    nearest_HK, rows_HK = squared_HKN.clamp_min(0).min(dim=-1)
    far = nearest_HK.sqrt() > TOLERANCE * kept.norm(dim=-1)
    if bool(far.any()):
        raise ValueError(
            f"{int(far.sum())} of {far.numel()} kept keys are no keys of the prompt. They were changed after it "
            "was run (rotated, merged, quantised), or another prompt was given."
        )
    if any(len(rows.unique()) < len(rows) for rows in rows_HK):
        raise ValueError(
            "Two kept keys of one head are the same row of the prompt. Rows cannot be told apart by their keys here; "
            "compare caches of a model that rotates its keys."
        )
    return rows_HK


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of the storages behind tensors, each storage once: a slice keeps its whole parent alive."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Rows that two caches hold of one prompt, summed over layers and heads; `heads_alike` hold the same set."""

    shared_rows: int
    only_ours_rows: int
    only_theirs_rows: int
    heads_alike: int
    heads: int


def overlap(ours_LHN: Tensor, theirs_LHN: Tensor) -> Overlap:
    """Compare two masks of the rows held."""
    alike_LH = (ours_LHN == theirs_LHN).all(-1)
    return Overlap(
        shared_rows=int((ours_LHN & theirs_LHN).sum()),
        only_ours_rows=int((ours_LHN & ~theirs_LHN).sum()),
        only_theirs_rows=int((theirs_LHN & ~ours_LHN).sum()),
        heads_alike=int(alike_LH.sum()),
        heads=alike_LH.numel(),
    )


def mask_without(tokens: int, heads: int, head_indices: Tensor, row_indices: Tensor) -> Tensor:
    """Rows of one layer that are not masked, bool [H, N], from the pairs that are."""
    mask_HN = torch.ones(heads, tokens, dtype=torch.bool)
    mask_HN[head_indices, row_indices] = False
    return mask_HN
