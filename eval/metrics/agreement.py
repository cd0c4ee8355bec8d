"""How far a policy's distribution over the next token is from the full cache's own, along the gold answer.

Scores say whether an answer came out right; these say whether the model's mind was changed at all. They need no gold
answer to be good, so they are defined where a model cannot do a task.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

__all__ = ["Agreement", "agreement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """Means over the positions of one answer: KL(full || policy) in nats, and how often both prefer the same token."""

    kl_nats: float
    top1_ratio: float


def agreement(full_log_probs_TV: Tensor, log_probs_TV: Tensor) -> Agreement:
    """Compare two runs of the same answer.

    Args:
        full_log_probs_TV: natural log-probabilities under the full cache, T positions, V tokens, fp32.
        log_probs_TV: the same under the policy.
    """
    # A token that the full cache rules out adds nothing, whatever its logarithm.
    terms_TV = (full_log_probs_TV.exp() * (full_log_probs_TV - log_probs_TV)).masked_fill(
        full_log_probs_TV.isinf(), 0.0
    )
    same_T = full_log_probs_TV.argmax(-1) == log_probs_TV.argmax(-1)
    # Rounding can leave the sum of equal distributions just below zero.
    return Agreement(kl_nats=max(0.0, float(terms_TV.sum(-1).mean())), top1_ratio=float(same_T.float().mean()))
