"""Cache-local positions: a query sees its rows as if they were numbered 0..n-1 without gaps.

Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453), section 3.2.

Attention depends on position differences only. Rows of the contiguous run that ends at the query keep their rotation;
every other live row is moved closer by the tokens missing between it and the query. Only rows that are protected can
lie outside that run, so only those ("pinned" rows) are ever re-rotated, each time from its pristine key.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["local_shift", "local_shift_reference"]


def local_shift(tokens_BW: Tensor, live_BW: Tensor, pinned: int, query_token_B: Tensor) -> Tensor:
    """Return how far each pinned row (the first `pinned` slots) moves towards the query, int64 [B, P].

    Args:
        tokens_BW: token position of each slot that is attended before the new tokens.
        live_BW: which slots hold a row.
        query_token_B: token position of the first new token of each batch row.
    """
    tokens = tokens_BW.long()
    pinned_BP1 = tokens[:, :pinned, None]
    rank = ((tokens[:, None, :] < pinned_BP1) & live_BW[:, None, :]).sum(-1)
    gap = (query_token_B.long() - live_BW.sum(-1))[:, None] - (tokens[:, :pinned] - rank)
    return torch.where(live_BW[:, :pinned], gap, torch.zeros_like(gap))


def local_shift_reference(tokens: list[int], query_token: int) -> dict[int, int]:
    """Plain oracle for one owner: token position -> shift, by numbering the rows 0..n-1 and the query n."""
    ranked = sorted(tokens)
    return {token: (query_token - len(ranked)) - (token - rank) for rank, token in enumerate(ranked)}
