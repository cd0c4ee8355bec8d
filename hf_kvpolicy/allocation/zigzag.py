"""ZigZagKV: rows for a layer by how many it needs, measured on the prompt (0x08D).

Source: Zhong et al., "ZigZagKV: Dynamic KV Cache Compression for Long-context Modeling based on Layer Uncertainty"
(arXiv 2412.09036). MBA, the minimum budget of attention, is the smallest number of a head's rows that hold a share of
its attention; LMBA is the mean over a layer's heads. With u_l = LMBA_l / sum(LMBA), B_l = B_min + (B - B_min) L u_l.

No code was released. LMBO, the same for outputs, is an analysis: allocation does not use it.

Letters: H heads, N rows, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from ..errors import BudgetError, ConfigError
from ._checks import check_attention
from .exact import Number, declared, shares

__all__ = ["minimum_rows_for_mass", "minimum_rows_for_output", "zigzag_targets"]


def minimum_rows_for_mass(attention_N: Tensor, mass: float) -> Tensor:
    """Return MBA: the smallest number of rows that hold at least the share `mass` of all attention.

    Args:
        attention_N: attention per row, [N] or [..., N], not negative; each owner is measured against its own sum.
        mass: share in (0, 1].

    Returns:
        int64 counts without the last axis, from float64 sums; 0 for an owner that received no attention.

    Raises:
        ConfigError: `mass` outside (0, 1].
        SelectionError: attention is negative or not finite, or there are no rows.
    """
    if not 0.0 < mass <= 1.0:
        raise ConfigError(f"mass={mass!r} is no share of the attention; give a number in (0, 1].")
    check_attention(attention_N)
    cumulative = attention_N.double().sort(dim=-1, descending=True).values.cumsum(-1)
    needed = mass * cumulative[..., -1:]
    return (cumulative < needed).sum(-1) + (needed > 0).squeeze(-1)


def zigzag_targets(lmba: Sequence[Number], mean_rows: Number, min_rows: Number) -> list[Fraction]:
    """Return real targets per layer that sum to layers x mean_rows, each at least min_rows.

    Args:
        lmba: one non-negative sensitivity per layer, of any scale.
        mean_rows: mean rows of a layer.
        min_rows: what every layer has whatever its sensitivity, at most mean_rows.

    Raises:
        ConfigError: a sensitivity is negative, or all are zero.
        BudgetError: min_rows is negative or above mean_rows.
    """
    least, pool = declared("min_rows", min_rows), declared("mean_rows", mean_rows) - declared("min_rows", min_rows)
    if least < 0 or pool < 0:
        raise BudgetError(
            f"A minimum of {min_rows} rows a layer does not fit a mean of {mean_rows}. "
            "Give a minimum from 0 to the mean."
        )
    return [least + pool * len(lmba) * share for share in shares("lmba", lmba)]


def minimum_rows_for_output(attention_HN: Tensor, values_HND: Tensor, similarity: float) -> Tensor:
    """Return LMBO: the smallest number of rows, best attended first, whose output resembles the full one.

    An analysis of a prompt, not part of any allocation. Resemblance is the cosine of the two outputs, so the partial
    attention need not be normalised. It is not monotone in the number of rows: the first count that reaches it is
    returned, all rows at the latest. Ties keep row order. The transient is [H, N, D] in float64, twice.

    Args:
        attention_HN: attention of one query, or its mean over queries, per head and row.
        values_HND: the rows' values, expanded to the same heads.
        similarity: cosine to reach, in (0, 1].

    Returns:
        int64 counts [H].

    Raises:
        ConfigError: `similarity` outside (0, 1].
        SelectionError: attention is negative or not finite, or there are no rows.
    """
    if not 0.0 < similarity <= 1.0:
        raise ConfigError(f"similarity={similarity!r} is no cosine to reach; give a number in (0, 1].")
    check_attention(attention_HN)
    ranked_HN, order_HN = attention_HN.double().sort(dim=-1, descending=True, stable=True)
    ranked_HND = values_HND.double().take_along_dim(order_HN[..., None], dim=1)
    outputs_HND = ranked_HND.mul_(ranked_HN[..., None]).cumsum(dim=1)
    reached_HN = torch.cosine_similarity(outputs_HND, outputs_HND[:, -1:], dim=-1) >= similarity
    # The full output is itself, also where rounding or a zero output keeps the cosine from saying so.
    reached_HN[:, -1] = True
    return reached_HN.int().argmax(dim=-1) + 1
