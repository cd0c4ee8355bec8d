"""What masks do to logits: a bool mask hides rows, a float mask is added.

Letters: B batch rows, H KV heads, Q query heads, G query heads per KV head, T queries, N rows, M map heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["mask_logits_"]


def mask_logits_(logits_BHGTN: Tensor, mask: Tensor) -> None:
    """Apply a mask in place. One of fewer rows is about the newest ones; all queries see the rows before them.

    Args:
        mask: bool [B or 1, M or 1, T, N], True where a query sees a row; or a bias [B or 1, Q, T or 1, N], -inf where
            it does not.
    """
    part, mask = logits_BHGTN[..., logits_BHGTN.shape[-1] - mask.shape[-1] :], mask.to(logits_BHGTN.device)
    if mask.dtype is torch.bool:
        part.masked_fill_(~mask.unsqueeze(2), float("-inf"))
    else:
        part.add_(mask.view(mask.shape[0], *part.shape[1:3], *mask.shape[2:]))
