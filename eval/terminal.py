"""Tables on the terminal: with rich where it is installed (it comes with typer), else as plain lines."""

from __future__ import annotations

import sys

from .report import COLUMNS, table_cells, tables
from .summary import CellSummary

__all__ = ["print_tables"]

_PIPE_COLUMNS = 180


def print_tables(summaries: list[CellSummary]) -> None:
    """Print one table for each task and length."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        _print_plain(summaries)
        return
    # Into a file or a pipe rich would squeeze every table into 80 columns.
    console = Console() if sys.stdout.isatty() else Console(width=_PIPE_COLUMNS)
    for title, group in tables(summaries):
        table = Table(*COLUMNS, title=title)
        for summary in group:
            table.add_row(*table_cells(summary))
        console.print(table)


def _print_plain(summaries: list[CellSummary]) -> None:
    for title, group in tables(summaries):
        print(f"\n{title}\n{' | '.join(COLUMNS)}")
        for summary in group:
            print(" | ".join(table_cells(summary)))
