"""Cells whose budget is what another cell held: baselines beside a policy that has no budget, or does not keep to one.

Example by example: of each prompt the baseline gets as many rows as take the bytes that the source held of it in the
mean over time. Where a policy drops rows these are its rows; where it stores them in fewer bytes (merged, quantized)
they are fewer. So a cell needs the source's row of the same example and nothing else, whoever runs the others, however
many there will be.
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
    # Of the model's own rows, as many as take what the cell held over time; None where that was not measured.
    rows_of_same_bytes: float | None


def finished(row: Row) -> Finished:
    """What of a row another cell may be matched to."""
    held = None
    if row.cache is not None and row.cache.rows_over_time_mean is not None:
        # What a row took after the prompt, in rows of the full cache.
        size = row.cache.payload_bytes / row.cache.full_kv_bytes / row.cache.kept_ratio
        held = row.cache.rows_over_time_mean * size
    return Finished(status=row.status, rows_of_same_bytes=held)


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
    if source.rows_of_same_bytes is None:
        raise NothingToMatchError(
            f"the row of {cell.source.label} was written before rows over time were measured; run it into a new folder"
        )
    return replace(cell, budget=max(1, round(source.rows_of_same_bytes)))


def declared_of(cell: Cell, declared: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the caches of a cell declare, whichever example: the rows of one are in its own record."""
    if cell.matched_to is None:
        return declared
    return {
        **{key: value for key, value in declared.items() if key != "manifest_sha256"},
        "budget": f"the rows of {cell.source.label}",
    }
