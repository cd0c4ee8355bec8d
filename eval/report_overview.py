"""A whole sweep in one table: what each policy and budget scores at each task point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .report_tables import Table, tables
from .summary import CellSummary

__all__ = ["OVERVIEW_NOTE", "overview_table"]

OVERVIEW_NOTE = (
    "Mean score / mean answer NLL in nats per token; the NLL alone where nothing is generated. Intervals and n stand "
    "in the tables of the task points. A difference here is no finding."
)


def overview_table(summaries: Iterable[CellSummary]) -> Table:
    """One line a policy and budget, one column a task point; no rows where there are not two points to look over."""
    points = tables(summaries)
    if len(points) < 2:
        return Table(columns=[], rows=[])
    labels = dict.fromkeys(summary.cell.label for _, group in points for summary in group)
    rows = [[label, *(_found(label, group) for _, group in points)] for label in labels]
    return Table(columns=["policy", *(title for title, _ in points)], rows=rows)


def _found(label: str, group: Sequence[CellSummary]) -> str:
    """A cell of the table, over its seeds; what has no result has its status."""
    cells = [summary for summary in group if summary.cell.label == label]
    measured = [summary.measured for summary in cells if summary.measured is not None]
    if not measured:
        return cells[0].status if cells else ""
    score, nll = (
        sum(getattr(found, name).mean for found in measured) / len(measured) for name in ("score", "answer_nll")
    )
    return f"{score:.2f} / {nll:.2f}" if cells[0].cell.max_new_tokens else f"{nll:.2f}"
