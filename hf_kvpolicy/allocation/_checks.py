"""Argument checks shared by the files of this room; each raises a full sentence."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import BudgetError, SelectionError

__all__ = ["check_attention", "rows_beside_window"]


def check_attention(attention: Tensor) -> None:
    """Raise SelectionError unless attention [..., N] over at least one row is finite and not negative."""
    if attention.shape[-1] == 0:
        raise SelectionError("Attention over no rows was given. Give at least one row.")
    if not bool((torch.isfinite(attention) & (attention >= 0)).all()):
        raise SelectionError(
            "Attention must be finite and not negative to be added up, but some of it is not. Check dtype and mask."
        )


def rows_beside_window(budget: int, window: int) -> int:
    """Return the rows a selection may choose; raise BudgetError unless the window leaves at least one."""
    if not 0 <= window < budget:
        raise BudgetError(
            f"A window of {window} rows must be at least 0 and leave a row of the budget of {budget}. "
            "Give a larger budget or a smaller window."
        )
    return budget - window
