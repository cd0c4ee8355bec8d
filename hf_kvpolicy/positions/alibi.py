"""ALiBi: attention logits get slope * (key position - query position); keys carry no position of their own.

Source: Press et al., "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation"
(arXiv 2108.12409). Softmax does not change when all logits of a query move by one number, so a bias is taken relative
to the newest row of a view instead of to each query: near rows have small, exact numbers, and one bias serves all
queries.

Letters: B batch rows, M map heads, Q query heads, N rows, P pinned rows, or rows of many owners, S stored heads, G
query heads of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

__all__ = ["AlibiSpec", "alibi_bias", "alibi_bias_of_owners", "alibi_bias_reference", "alibi_in"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AlibiSpec:
    """How one model biases its logits."""

    # By query head.
    slopes: tuple[float, ...]
    # Whether distance counts columns, pads among them, or tokens.
    counts_pads: bool = False
    # In what the model multiplies slopes with positions, and to what it rounds the product before logits get it;
    # "model" is the dtype it runs in.
    product_dtype: torch.dtype = torch.float32
    rounds_to: torch.dtype | Literal["model"] = torch.float32
    # What the rounded product is multiplied with.
    scale: float = 1.0

    def of_heads(self, first: int, count: int) -> AlibiSpec:
        """Return the spec of some consecutive query heads."""
        return replace(self, slopes=self.slopes[first : first + count])

    def between(self, slopes: Tensor, positions: Tensor, newest: Tensor) -> Tensor:
        """Return the bias at some positions less that at others, fp32; all broadcast against each other."""
        assert isinstance(self.rounds_to, torch.dtype), "alibi_in comes first"
        if self.product_dtype is self.rounds_to is torch.float32:
            return slopes * (positions - newest) * self.scale
        # Positions are rounded first: torch would take a single one as it is.
        products = (slopes * part.to(self.product_dtype) for part in (positions, newest))
        there, here = (part.to(self.rounds_to).float() for part in products)
        return (there - here) * self.scale

    def slopes_on(self, device: torch.device) -> Tensor:
        """Return the slopes on a device, [Q]."""
        return _slopes(self.slopes, self.product_dtype, device)


def alibi_in(spec: AlibiSpec | None, dtype: torch.dtype | None) -> AlibiSpec | None:
    """Return the spec for a model whose rows have this dtype; None for families whose keys carry positions."""
    if spec is None or spec.rounds_to != "model":
        return spec
    assert dtype is not None, "a layer has brought rows"
    return replace(spec, rounds_to=dtype)


def alibi_bias(spec: AlibiSpec, positions_BMN: Tensor, live_BMN: Tensor, shift_BP: Tensor | None = None) -> Tensor:
    """Return the bias of every row, relative to that of the newest one, fp32 [B, Q, 1, N].

    Args:
        positions_BMN: position of each row, whole numbers; anything where no row is.
        live_BMN: which slots hold a row.
        shift_BP: how far each of the first P rows moves towards the query. Rows are then numbered from the oldest.
    """
    if not positions_BMN.shape[-1]:
        # An owner of ragged rows to which only pads have come yet.
        return positions_BMN.new_zeros((positions_BMN.shape[0], len(spec.slopes), 1, 0), dtype=torch.float32)
    positions = positions_BMN.long()
    if shift_BP is not None:
        pinned = shift_BP.shape[1]
        positions = torch.cat([positions[:, :, :pinned] + shift_BP[:, None], positions[:, :, pinned:]], dim=2)
        oldest = positions.masked_fill(~live_BMN, torch.iinfo(torch.int64).max).amin(-1, keepdim=True)
        positions = torch.where(live_BMN, positions - oldest, 0)
    newest = positions.masked_fill(~live_BMN, 0).amax(-1, keepdim=True)
    positions = torch.where(live_BMN, positions, newest)
    heads = positions.shape[1]
    if heads > 1:
        group = len(spec.slopes) // heads
        positions, newest = (part.repeat_interleave(group, dim=1) for part in (positions, newest))
    return spec.between(spec.slopes_on(positions.device)[:, None], positions, newest)[:, :, None]


def alibi_bias_of_owners(
    spec: AlibiSpec, positions_P: Tensor, newest_P: Tensor, head_P: Tensor, *, heads: int
) -> Tensor:
    """Return the bias of rows of many owners, fp32 [G, P], for the query heads of each row's owner.

    Args:
        newest_P: newest position of each row's batch row.
        head_P: stored head of each row's owner, of so many `heads`.
    """
    slopes_GS = spec.slopes_on(positions_P.device).view(heads, -1).T
    return spec.between(slopes_GS[:, head_P], positions_P, newest_P)


def alibi_bias_reference(slopes: list[float], positions: list[int], query: int) -> list[list[float]]:
    """Plain oracle for one query: what each head's logits get, by row."""
    return [[slope * (position - query) for position in positions] for slope in slopes]


@lru_cache(maxsize=64)
def _slopes(slopes: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    # The first caller may be in inference mode, and the tensor outlives it.
    with torch.inference_mode(False):
        return torch.tensor(slopes, dtype=dtype, device=device)
