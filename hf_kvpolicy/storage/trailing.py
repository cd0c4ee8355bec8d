"""The segment that tokens still join, one an owner, and tokens that wait to be merged.

The rows of a trailing segment are kept before their rotation and in fp32, as they will be averaged again. They are
never written: every forward makes new ones. Where a token is, its row lies with the newest token of its batch row.

Letters: B batch rows, H KV heads, T tokens, X channels of keys and values together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .dense import stored_tensors

__all__ = ["PendingTokens", "TrailingSegments"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TrailingSegments:
    """The last segment of every owner of a layer. Immutable."""

    means_BHX: Tensor  # fp32, key before its rotation, then value
    masses_BH: Tensor  # fp32; 0 where a batch row has had no token

    @classmethod
    def none(cls, batch: int, heads: int, channels: int, device: torch.device) -> TrailingSegments:
        """Return what there is before the first token."""
        with stored_tensors():
            means = torch.zeros((batch, heads, channels), dtype=torch.float32, device=device)
            return cls(means_BHX=means, masses_BH=means.new_zeros((batch, heads)))

    @property
    def row_bytes(self) -> int:
        """Bytes of one owner's row, without its mass."""
        return self.means_BHX.shape[2] * self.means_BHX.element_size()

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.means_BHX.device

    def batch(self, index_B: Tensor) -> TrailingSegments:
        """Return the segments of batch rows selected, repeated or reordered."""
        means, masses = (part.index_select(0, index_B) for part in self.tensors())
        return TrailingSegments(means_BHX=means, masses_BH=masses)

    def to(self, device: torch.device) -> TrailingSegments:
        """Return the segments on another device; self when they lie there."""
        if device == self.device:
            return self
        return TrailingSegments(means_BHX=self.means_BHX.to(device), masses_BH=self.masses_BH.to(device))

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        return self.means_BHX, self.masses_BH


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PendingTokens:
    """A layer's new tokens and what they decide, before they are merged. Immutable."""

    rows_BHTX: Tensor  # fp32, key before its rotation, then value
    accumulates_BHT: Tensor  # bool
    weights_BHT: Tensor  # fp32

    @property
    def device(self) -> torch.device:
        """Where the rows lie."""
        return self.rows_BHTX.device

    def first(self, tokens: int) -> PendingTokens:
        """Return the first tokens (windows, not copies)."""
        return self._of([part[:, :, :tokens] for part in self.tensors()])

    def copied(self) -> PendingTokens:
        """Return an independent copy without a graph."""
        return self._of([part.detach().clone() for part in self.tensors()])

    def batch(self, index_B: Tensor) -> PendingTokens:
        """Return the tokens of batch rows selected, repeated or reordered."""
        return self._of([part.index_select(0, index_B) for part in self.tensors()])

    def to(self, device: torch.device) -> PendingTokens:
        """Return the tokens on another device; self when they lie there."""
        return self if device == self.device else self._of([part.to(device) for part in self.tensors()])

    def tensors(self) -> tuple[Tensor, ...]:
        """Return every tensor this object keeps alive."""
        return self.rows_BHTX, self.accumulates_BHT, self.weights_BHT

    def _of(self, parts: list[Tensor]) -> PendingTokens:
        rows, accumulates, weights = parts
        return replace(self, rows_BHTX=rows, accumulates_BHT=accumulates, weights_BHT=weights)
