"""HeadKV: rows for every (layer, head) by a table of importances measured once for a checkpoint (0x08G).

Source: Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and
Reasoning" (arXiv 2410.19258). Of a mean of b rows, b / beta go into a pool: b_h = (b - b / beta) + S_h (b / beta) L H.
A larger beta therefore means a *smaller* pool; the released README says the opposite of its code.

Deviations: the released code rounds each head by itself and never hands on what a head cannot use; `head_targets` stays
exact and leaves whole rows to `apportion`. `head_reference_rows` counts what the released code keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from ..errors import ConfigError
from ._checks import rows_beside_window
from .exact import Number, declared, shares

__all__ = ["head_reference_rows", "head_reference_total_rows", "head_targets", "query_to_kv_importance"]


def head_targets(importance: Sequence[Number], mean_rows: Number, beta: Number) -> list[Fraction]:
    """Return real targets per owner that sum to owners x mean_rows.

    Args:
        importance: one non-negative number per owner, layer-major, of any scale; floats count as written.
        mean_rows: mean rows of an owner.
        beta: at least 1; 1 pools everything, a larger one leaves more to the equal base.

    Raises:
        ConfigError: beta below 1, an importance is negative, or all are zero.
    """
    mean, divisor = declared("mean_rows", mean_rows), declared("beta", beta)
    _check_beta(beta)
    pooled = mean / divisor
    return [mean - pooled + share * pooled * len(importance) for share in shares("importance", importance)]


def head_reference_rows(importance: Sequence[float], budget: int, window: int, beta: float, tokens: int) -> list[int]:
    """Return the rows each owner keeps in the released code, window rows included.

    It divides with float floor division, rounds every owner by itself (half to even), and never hands on what an owner
    cannot use, so the total is its own: see `head_reference_total_rows`. Prompts not longer than the budget stay whole.

    Args:
        importance: one non-negative number per owner, layer-major, of any scale.
        budget: mean rows per owner, window included.
        window: protected last rows, below the budget.
        beta: at least 1.
        tokens: of the prompt.

    Raises:
        ConfigError: beta below 1, an importance is negative, or all are zero.
        BudgetError: the window leaves no row to choose.
    """
    _check_beta(beta)
    base = rows_beside_window(budget, window)
    pooled = base // beta
    rows = [
        round(float(share) * pooled * len(importance) + base - pooled) for share in shares("importance", importance)
    ]
    return [tokens if base > tokens - window else min(tokens, row + window) for row in rows]


def head_reference_total_rows(importance: Sequence[float], budget: int, window: int, beta: float, tokens: int) -> int:
    """Return the rows of all owners that `head_reference_rows` adds up to; raises as it does."""
    return sum(head_reference_rows(importance, budget, window, beta, tokens))


def query_to_kv_importance(importance: Sequence[Number], group_size: int) -> list[Fraction]:
    """Return the summed importance of the query heads that read each KV head.

    A mean would give the same targets, since a table is normalised before it is used.

    Args:
        importance: one number per query head, layer-major; the heads of a group are neighbours.
        group_size: query heads per KV head.

    Raises:
        ConfigError: the heads do not divide into whole groups.
    """
    if group_size < 1 or len(importance) % group_size:
        raise ConfigError(
            f"{len(importance)} query heads do not divide into groups of {group_size}. Give the importance of every "
            "query head and the model's number of query heads per KV head."
        )
    exact = [declared("importance", value) for value in importance]
    return [sum(exact[i : i + group_size], Fraction(0)) for i in range(0, len(exact), group_size)]


def _check_beta(beta: Number) -> None:
    if declared("beta", beta) < 1:
        raise ConfigError(f"beta={beta!r} would pool more than the budget; give at least 1.")
