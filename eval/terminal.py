"""Tables on the terminal: with rich where it is installed (it comes with typer), else as plain lines."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .report_tables import BYTES_NOTE, COLUMNS, COST_COLUMNS, table_cells, tables
from .summary import CellSummary

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["print_tables"]

_PIPE_COLUMNS, _UNLIMITED = 200, 10_000


def print_tables(summaries: list[CellSummary]) -> None:
    """Print one table a task point, or two (quality, cost) where the terminal is too narrow for one."""
    try:
        from rich.console import Console
    except ImportError:
        _print_plain(summaries)
        return
    # Into a file or a pipe rich would squeeze every table into 80 columns; both obey COLUMNS.
    follows = sys.stdout.isatty() or os.environ.get("COLUMNS")
    # Labels hold whatever a sweep says, and none of it is markup.
    console = Console(width=None if follows else _PIPE_COLUMNS, markup=False, emoji=False)
    for title, group in tables(summaries):
        whole = _table(title, group, COLUMNS)
        unwrapped = console.measure(whole, options=console.options.update(width=_UNLIMITED)).maximum
        if unwrapped <= console.width:
            console.print(whole)
            continue
        quality = [column for column in COLUMNS if column not in COST_COLUMNS]
        console.print(_table(title, group, quality))
        console.print(_table("cost", group, ["policy", *COST_COLUMNS]))
    console.print(BYTES_NOTE, highlight=False)


def _table(title: str, group: list[CellSummary], columns: Sequence[str]) -> Table:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for summary in group:
        cells = dict(zip(COLUMNS, table_cells(summary), strict=True))
        table.add_row(*(cells[column] for column in columns))
    return table


def _print_plain(summaries: list[CellSummary]) -> None:
    for title, group in tables(summaries):
        print(f"\n{title}\n{' | '.join(COLUMNS)}")
        for summary in group:
            print(" | ".join(table_cells(summary)))
    print(f"\n{BYTES_NOTE}")
