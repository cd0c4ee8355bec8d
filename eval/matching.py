"""Cells whose budget is what another cell held: baselines beside a policy that has no budget, or does not keep to one.

Example by example: of each prompt the baseline gets as many rows as the source held of it in the mean over time. So it
needs the source's row of the same example and nothing else, whoever runs the others, however many there will be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .cells import Cell
from .outcomes import EQUALS_FULL
from .records import Row

__all__ = ["Finished", "NothingToMatchError", "declared_of", "finished", "source_equals_full", "with_budget"]


class NothingToMatchError(LookupError):
    """The source has no row of this example, or one that does not say how many rows it held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """What is remembered of a row that need not be run again."""

    status: str
    rows_over_time_mean: float | None


def finished(row: Row) -> Finished:
    """What of a row another cell may be matched to."""
    held = None if row.cache is None else row.cache.rows_over_time_mean
    return Finished(status=row.status, rows_over_time_mean=held)


def source_equals_full(source: Finished | None) -> bool:
    """Whether the source was not run because its budget takes nothing; then the same rows take nothing either."""
    return source is not None and source.status == EQUALS_FULL


def with_budget(cell: Cell, source: Finished | None) -> Cell:
    """The cell to run for one example; a cell that is matched to no other as it is.

    Raises:
        NothingToMatchError: nothing is known of the source.
    """
    if cell.matched_to is None:
        return cell
    if source is None:
        raise NothingToMatchError(f"{cell.source.label} has no result for this example, so there are no rows to match")
    if source.rows_over_time_mean is None:
        raise NothingToMatchError(
            f"the row of {cell.source.label} was written before rows over time were measured; run it into a new folder"
        )
    return replace(cell, budget=max(1, round(source.rows_over_time_mean)))


def declared_of(cell: Cell, declared: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the caches of a cell declare, whichever example: the rows of one are in its own record."""
    if cell.matched_to is None:
        return declared
    return {
        **{key: value for key, value in declared.items() if key != "manifest_sha256"},
        "budget": f"the rows of {cell.source.label}",
    }
