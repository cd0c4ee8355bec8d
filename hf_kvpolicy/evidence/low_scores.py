"""A history of low scores: one bit per (query, row) for the last queries.

Source: Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at
Test Time" (arXiv 2305.17118), Algorithm 2: I[j] counts the queries of the history window that gave row j less than the
uniform share. Rows with large counts go first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import SelectionError
from .carried import CarriedEvidence, QueryBlock, reduce_group

__all__ = ["LowScoreHistory"]

# Bits unpacked at once, one byte each.
_UNPACKED_ELEMENTS = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LowScoreHistory(CarriedEvidence):
    """Bits of the last `history` queries, packed eight to a byte; a query's bit lies at its position mod history."""

    history: int
    # The released code's threshold: the value at this rank of a query's probabilities instead of the uniform share.
    quantile: float | None = None
    name: str = "low_score_history"
    # Of two rows with equal counts the lower position is dropped first.
    keeps_newest_on_ties: bool = True

    @property
    def channels(self) -> int:
        """Bytes per row."""
        return -(-self.history // 8)

    @property
    def dtype(self) -> torch.dtype:
        """Packed bits."""
        return torch.uint8

    @property
    def last_queries(self) -> int | None:
        """Only the history window can be read later."""
        return self.history

    def observe_(self, state_BSNX: Tensor, block: QueryBlock, group: str) -> None:
        """Write this block's bits over those of the queries `history` tokens earlier.

        Raises:
            SelectionError: a query's attention is not finite. No bit could say so to a later selection.
        """
        attention = reduce_group(block.attention_BSGTN, group)
        if not bool(attention.sum().isfinite()):
            raise SelectionError(
                "Attention is not finite: a query produced NaN or infinity, so that no row is below its share. Check "
                "the model's dtype (fp16 overflow) and inputs; the cache still holds the state before this forward."
            )
        seen = block.seen_BSTN
        low_BSTN = (attention < self._threshold(attention, seen)) & seen
        place_BT = block.query_tokens_BT % self.history
        if block.real_BT is not None:
            # Pads write to a place of their own, which is cut off again.
            place_BT = torch.where(block.real_BT, place_BT, 8 * self.channels)
        if low_BSTN.shape[2] == 1 and block.real_BT is None:
            self._write_bit(state_BSNX, low_BSTN[:, :, 0], place_BT[:, 0])
        else:
            self._write_bits(state_BSNX, low_BSTN, place_BT)

    def scores(self, state_SNX: Tensor, tokens_MN: Tensor) -> Tensor:
        """Return minus the number of low scores."""
        counts = state_SNX.new_zeros(state_SNX.shape[:-1], dtype=torch.float32)
        for bit in range(8):
            counts += ((state_SNX >> bit) & 1).sum(dim=-1)
        return -counts

    def describe(self) -> dict[str, Any]:
        """Return window and threshold rule."""
        return {"history": self.history, "quantile": self.quantile}

    def _threshold(self, attention_BSTN: Tensor, seen_BSTN: Tensor) -> Tensor:
        visible = seen_BSTN.sum(dim=-1, keepdim=True).clamp(min=1)
        if self.quantile is None:
            return 1.0 / visible.float()
        # Unseen rows sort last, so that the rank counts visible rows only.
        ordered = torch.where(seen_BSTN, attention_BSTN, torch.inf).sort(dim=-1).values
        rank = (self.quantile * visible.double()).long().clamp(max=attention_BSTN.shape[-1] - 1)
        return ordered.gather(-1, torch.minimum(rank, visible - 1))

    def _write_bits(self, state_BSNX: Tensor, low_BSTN: Tensor, place_BT: Tensor) -> None:
        """Unpack, write and pack again, a block of rows at a time so that the unpacked bits stay small."""
        batch, stored, rows, channels = state_BSNX.shape
        weights = 1 << torch.arange(8, device=state_BSNX.device)
        block = max(1, _UNPACKED_ELEMENTS // (batch * stored * 8 * channels))
        for start in range(0, rows, block):
            part = state_BSNX[:, :, start : start + block]
            bits = ((part[..., None] >> torch.arange(8, dtype=torch.uint8, device=part.device)) & 1).flatten(3)
            bits = torch.cat([bits, torch.zeros_like(bits[..., :1])], dim=3)
            low = low_BSTN[..., start : start + block].transpose(2, 3).to(torch.uint8)
            bits.scatter_(3, place_BT[:, None, None, :].expand_as(low), low)
            packed = (bits[..., :-1].reshape(*bits.shape[:3], channels, 8).long() * weights).sum(-1)
            part.copy_(packed.to(torch.uint8))

    def _write_bit(self, state_BSNX: Tensor, low_BSN: Tensor, place_B: Tensor) -> None:
        batch, stored, rows, _ = state_BSNX.shape
        byte = (place_B // 8).view(-1, 1, 1, 1).expand(batch, stored, rows, 1)
        shift = (place_B % 8).view(-1, 1, 1, 1)
        old = state_BSNX.gather(3, byte)
        one = torch.ones_like(shift) << shift
        new = (old.long() & ~one) | (low_BSN[..., None].long() << shift)
        state_BSNX.scatter_(3, byte, new.to(torch.uint8))
