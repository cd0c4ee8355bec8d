"""What the benchmark commands share: from a few options to a sweep, which runs as `kvpolicy eval run` runs it.

A command (`longbench.py` is one) declares its parameters with the options below, adds its own, and hands `QuickRun` the
tasks. Everything that a sweep file can say and an option cannot is reached with `--set`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from . import fields
from .cli import default_folder, run_or_list
from .run_directory import RunDirectory
from .sweep import parse_sweep

__all__ = [
    "AgnosticOption",
    "BudgetOption",
    "DeviceOption",
    "DryRunOption",
    "DtypeOption",
    "ExamplesOption",
    "LengthOption",
    "ModelOption",
    "OutOption",
    "PolicyOption",
    "QuickRun",
    "RandomOption",
    "SetOption",
]

ModelOption = Annotated[str, typer.Option(help="Hub name or folder.")]
DtypeOption = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
DeviceOption = Annotated[str, typer.Option(help="cpu, cuda, ...")]
PolicyOption = Annotated[list[str], typer.Option(help="Name of a policy; can be repeated.")]
BudgetOption = Annotated[
    list[str], typer.Option(help='Rows, share of the prompt, or bytes: 1024, 0.25, "64MiB"; can be repeated.')
]
LengthOption = Annotated[list[int], typer.Option(min=1, help="Tokens; can be repeated.")]
ExamplesOption = Annotated[int | None, typer.Option(min=1, help="Examples of each task.")]
AgnosticOption = Annotated[
    bool, typer.Option("--query-agnostic", help="Feed the text first: rows are selected before the question is seen.")
]
RandomOption = Annotated[bool, typer.Option(help="Also run random selection at every budget.")]
OutOption = Annotated[Path | None, typer.Option(help="Folder for the results; finished rows in it are kept.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override of the sweep, such as policies.0.options.window=16.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="List the cells and stop.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuickRun:
    """The options that are the same for every benchmark; `name` begins the name of a folder made for the results."""

    name: str
    model: str
    dtype: str = "auto"
    device: str = "cpu"
    policies: Sequence[str]
    budgets: Sequence[str] = ()
    query_agnostic: bool = False
    include_random: bool = True
    overrides: Sequence[str] = ()
    out: Path | None = None
    dry_run: bool = False

    def document(self, tasks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The sweep's plain mapping, as a YAML file would hold it.

        Raises:
            ConfigError: an override that sets nothing.
        """
        document = {
            "model": {"name": self.model, "dtype": self.dtype, "device": self.device},
            "tasks": [dict(task) for task in tasks],
            "policies": [{"name": policy} for policy in self.policies],
            "budgets": [fields.parse_value(budget, where=f"--budget {budget!r}") for budget in self.budgets],
            "query_aware": not self.query_agnostic,
            "include_random": self.include_random,
        }
        for dotted, value in map(fields.parse_override, self.overrides):
            fields.set_dotted(document, dotted, value)
        return document

    def run(self, tasks: Sequence[Mapping[str, Any]], conclude: Callable[[RunDirectory], None]) -> None:
        """Run the tasks and conclude from all rows in the folder, or list the cells of the tasks where `dry_run`.

        Raises:
            ConfigError: whatever a sweep is refused for.
            typer.Exit: status 1, when a row failed; the others are kept, and concluded from.
        """
        out = self.out or default_folder(self.name)
        failed = run_or_list(parse_sweep(self.document(tasks)), out, dry_run=self.dry_run)
        if not self.dry_run:
            conclude(RunDirectory(out))
        if failed:
            raise typer.Exit(1)
