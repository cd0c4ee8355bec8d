"""Ada-KV: a layer's heads compete for its budget by their scores, with a uniform part as safeguard (0x08E).

Source: Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference"
(arXiv 2407.11550). B*_i counts the global top B scores that lie in head i; B~_i = alpha B*_i + (1 - alpha) B / H.

Here alpha multiplies the *adaptive* part, as the equation is printed. The released code names the other part: it keeps
round((1 - floor) B*_i + int(floor B / H)), so floor is the *uniform* share and floor = 1 - alpha. The paper's
default alpha = 0.2 makes one fifth adaptive as printed. The code's floor is 0.2 on its command line, which makes four
fifths adaptive (alpha = 0.8), and 0.5 in its configuration, half of each.

Deviations: the released code rounds each head by itself, and the heads need not add up to the budget; `apportion` does.

Letters: N rows of one owner.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from ..errors import BudgetError, ConfigError, SelectionError
from .exact import Number, declared

__all__ = ["global_top_counts", "global_top_counts_reference", "safeguarded_targets"]


def global_top_counts(scores_by_owner: Sequence[Tensor], total: int) -> list[int]:
    """Return how many of the `total` best scores lie in each owner; all of them when there are fewer.

    Among equal scores the earlier owner wins, then the earlier row.

    Args:
        scores_by_owner: one tensor [N] for each owner, its own N, rows in ascending position.
        total: rows to hand out.

    Raises:
        BudgetError: `total` is negative.
        SelectionError: a score is not finite.
    """
    if total < 0:
        raise BudgetError(f"A total of {total} rows cannot be handed out. Give 0 or more.")
    if not scores_by_owner:
        return []
    scores = torch.cat(list(scores_by_owner))
    if not bool(torch.isfinite(scores).all()):
        raise SelectionError(
            "Scores of several owners compete, but some are not finite. Leave out rows that are masked."
        )
    lengths = torch.tensor([len(own) for own in scores_by_owner], device=scores.device)
    owners = torch.repeat_interleave(torch.arange(len(lengths), device=scores.device), lengths)
    # Owners lie one after the other, rows in order: a stable sort keeps that order among equal scores.
    best = torch.argsort(scores, descending=True, stable=True)[:total]
    counts: list[int] = torch.bincount(owners[best], minlength=len(lengths)).tolist()
    return counts


def global_top_counts_reference(scores_by_owner: Sequence[Sequence[float]], total: int) -> list[int]:
    """Plain oracle of `global_top_counts`."""
    ranked = sorted((-score, owner, row) for owner, own in enumerate(scores_by_owner) for row, score in enumerate(own))
    winners = [owner for _, owner, _ in ranked[:total]]
    return [winners.count(owner) for owner in range(len(scores_by_owner))]


def safeguarded_targets(counts: Sequence[int], total: int, alpha: Number) -> list[Fraction]:
    """Return real targets per owner between its count and the equal share of `total`; they sum to it if the counts do.

    Args:
        counts: rows of each owner among the best, from `global_top_counts`.
        total: rows of all owners together.
        alpha: weight of the counts in [0, 1]; 0 is uniform, 1 is fully adaptive.

    Raises:
        ConfigError: alpha outside [0, 1].
    """
    adaptive = declared("alpha", alpha)
    if not 0 <= adaptive <= 1:
        raise ConfigError(f"alpha={alpha!r} is the adaptive share of the budget; give a number in [0, 1].")
    return [adaptive * count + (1 - adaptive) * Fraction(total, len(counts)) for count in counts]
