"""`python -m hf_kvpolicy.eval.ruler`: RULER's tasks under cache policies."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

import typer

from .cli import errors_as_exit_codes
from .list_options import LengthsOption, ListCommand
from .quick import (
    AgnosticOption,
    BudgetOption,
    DeviceOption,
    DryRunOption,
    DtypeOption,
    ExamplesOption,
    ModelOption,
    OutOption,
    PolicyOption,
    QuickRun,
    RandomOption,
    SetOption,
)
from .run_directory import RunDirectory
from .tasks.registry import task_entry

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TEXTS = ("sotu", "pydoc")
_NIAH = ("single_1", "single_2", "single_3", "multikey_1", "multikey_2", "multikey_3", "multivalue", "multiquery")
_TASKS = [*(f"niah_{kind}" for kind in _NIAH), "vt", "cwe", "fwe"]


@app.command(cls=ListCommand)
def ruler(
    model: ModelOption,
    policy: PolicyOption = ["snapkv"],  # noqa: B006  (typer copies it)
    budget: BudgetOption = ["1024"],  # noqa: B006
    lengths: LengthsOption = [4096],  # noqa: B006
    tasks: Annotated[list[str], typer.Option(help="RULER's names; without any, all that need no data.")] = _TASKS,
    haystack: Annotated[str, typer.Option(help="sotu, pydoc, or RULER's essays as a file.")] = "pydoc",
    templates: Annotated[str | None, typer.Option(help="A RULER checkout whose wording is used.")] = None,
    data: Annotated[str | None, typer.Option(help="File of the questions of qa_1 or qa_2.")] = None,
    examples: ExamplesOption = None,
    query_agnostic: AgnosticOption = False,
    random: RandomOption = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    set_: SetOption = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run RULER's tasks, or continue a run, and print the mean over tasks in percent."""
    with errors_as_exit_codes():
        given = {"templates": templates, "data": data, "haystack": None if haystack in _TEXTS else haystack}
        grid = {"lengths_tokens": lengths, "num_examples": examples or 10}
        quick = QuickRun(
            name="ruler",
            model=model,
            dtype=dtype,
            device=device,
            policies=policy,
            budgets=budget,
            query_agnostic=query_agnostic,
            include_random=random,
            overrides=set_ or [],
            out=out,
            dry_run=dry_run,
        )
        quick.run([{**_point(task, haystack, given), **grid} for task in tasks], _print_means)


def _point(task: str, haystack: str, given: dict[str, Any]) -> dict[str, Any]:
    """Name and parameters of a task under RULER's name of it."""
    entry = task_entry(f"ruler_{task}")
    needs_text = "haystack" in entry.params and haystack in _TEXTS
    params = {key: value for key, value in given.items() if key in entry.params and value is not None}
    return {"name": f"ruler_{task}_{haystack}" if needs_text else f"ruler_{task}", "params": params}


def _print_means(directory: RunDirectory) -> None:
    """RULER's number: the mean over tasks of their scores, in percent; of those alone that were asked alike."""
    from .cells import settings_of
    from .summary import summarise

    summaries = summarise(directory.rows())
    setting = settings_of(summary.cell for summary in summaries)
    scores: dict[tuple[int, str], list[float]] = defaultdict(list)
    for summary in summaries:
        if summary.measured is not None:
            title = f"{summary.cell.label}{setting(summary.cell)}"
            scores[summary.cell.length_tokens, title].append(100 * summary.measured.score.mean)
    for (length, label), found in scores.items():
        typer.echo(f"{length} tokens, {label}: {sum(found) / len(found):.2f} over {len(found)} tasks")


if __name__ == "__main__":
    app()
