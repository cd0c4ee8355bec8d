"""`kvpolicy eval tasks`: every task by family, as tables where rich is installed, else as lines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import typer

__all__ = ["add_commands"]


def add_commands(app: typer.Typer, errors: Callable[[], AbstractContextManager[None]]) -> None:
    """Add `tasks` to the command group `app`; `errors` turns what is refused into an exit code."""

    @app.command()
    def tasks() -> None:
        """List all tasks with what they ask for and the parameters they take, by family."""
        with errors():
            _print_tasks()


def _print_tasks() -> None:
    from .tasks.registry import task_families

    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for family, entries in task_families().items():
            typer.echo(f"\n{family}")
            for name, entry in entries.items():
                typer.echo(f"{name} | {entry.about} | {', '.join(entry.params)}")
        return
    console = Console()
    for family, entries in task_families().items():
        table = Table(title=family, title_justify="left")
        # A name is what is copied from here, so it is never broken.
        table.add_column("task", no_wrap=True)
        table.add_column("what it asks for", overflow="fold")
        table.add_column("parameters", overflow="fold")
        for name, entry in entries.items():
            table.add_row(name, entry.about, ", ".join(entry.params))
        console.print(table)
