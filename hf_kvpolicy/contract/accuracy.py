"""What omitting rows changes in one attention output, and how selections differ (0x02K, 0x02L, 0x0EJ).

Local measures of one query, layer and head: none of them orders selections by task quality.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import SelectionError
from .costs import Ratio

__all__ = [
    "LocalError",
    "churn",
    "local_error",
    "oracle_topk_recall",
    "retained_mass",
    "selected_output",
    "topk_positions",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalError:
    """Retained and omitted mass, L2 output error, and that error over the dense norm (None if it is 0)."""

    retained_mass: float
    omitted_mass: float
    l2_error: float
    relative_error: float | None


def retained_mass(probabilities_T: Tensor, selected: Sequence[int]) -> float:
    """Sum of the dense probabilities [T] of the selected rows.

    Raises SelectionError for an empty selection, a duplicate or an index outside [0, T).
    """
    return float(probabilities_T.double()[_index(probabilities_T, selected)].sum())


def selected_output(probabilities_T: Tensor, values_TD: Tensor, selected: Sequence[int]) -> Tensor:
    """Attention output [D] over the selected rows alone, in float64: sum of p_i / M_S * v_i.

    Raises SelectionError as `retained_mass` does, and when the selected rows carry no mass at all.
    """
    index = _index(probabilities_T, selected)
    kept = probabilities_T.double()[index]
    if not float(kept.sum()) > 0.0:
        raise SelectionError(
            f"The selected rows {list(selected)} carry no probability mass, so their output is undefined. "
            "Select at least one row with mass."
        )
    return (kept / kept.sum()) @ values_TD.double()[index]


def local_error(probabilities_T: Tensor, values_TD: Tensor, selected: Sequence[int]) -> LocalError:
    """Compare the output over `selected` with the dense output of probabilities [T] and values [T, D].

    A dense norm within the rounding of its own terms counts as 0: values that cancel leave a remainder, and
    an error divided by it would mean nothing. Raises SelectionError as `selected_output` does.
    """
    dense = probabilities_T.double() @ values_TD.double()
    error = float(torch.linalg.vector_norm(selected_output(probabilities_T, values_TD, selected) - dense))
    norm = float(torch.linalg.vector_norm(dense))
    terms = float((probabilities_T.double() * torch.linalg.vector_norm(values_TD.double(), dim=-1)).sum())
    rounding = probabilities_T.shape[0] * torch.finfo(probabilities_T.dtype).eps * terms
    mass = retained_mass(probabilities_T, selected)
    return LocalError(
        retained_mass=mass,
        omitted_mass=1.0 - mass,
        l2_error=error,
        relative_error=error / norm if norm > rounding else None,
    )


def topk_positions(scores_T: Tensor, k: int) -> list[int]:
    """Return the k highest-scored indices, ties to the lower index, in descending score order."""
    return [int(i) for i in torch.argsort(scores_T, descending=True, stable=True)[:k]]


def oracle_topk_recall(oracle_scores_T: Tensor, selected: Sequence[int], k: int) -> Ratio:
    """Share of the oracle's k best rows that were selected."""
    best = set(topk_positions(oracle_scores_T, k))
    return Ratio(numerator=len(best & set(selected)), denominator=len(best))


def churn(current: Iterable[int], previous: Iterable[int]) -> Ratio:
    """Rows that changed over rows in either set: 1 - |now & before| / |now | before| (0x0EJ)."""
    now, before = set(current), set(previous)
    return Ratio(numerator=len(now ^ before), denominator=len(now | before))


def _index(probabilities_T: Tensor, selected: Sequence[int]) -> Tensor:
    rows = probabilities_T.shape[0]
    if not selected or len(set(selected)) != len(selected) or not all(0 <= i < rows for i in selected):
        raise SelectionError(
            f"The selection {list(selected)} must name at least one row, each once, within 0 to {rows - 1}. "
            "Correct the selection."
        )
    return torch.tensor(list(selected), dtype=torch.int64, device=probabilities_T.device)
