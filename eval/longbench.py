"""`python -m hf_kvpolicy.eval.longbench`: LongBench under cache policies, with the scores as they are published."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer

from ..errors import ConfigError, did_you_mean
from .cells import Cell, settings_of
from .cli import errors_as_exit_codes
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
from .records import Row
from .run_directory import RunDirectory
from .tasks.longbench_table import LENGTH_BUCKETS, LONGBENCH_TASKS

__all__ = ["app", "published_scores"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

# No task has more records; where there are fewer, all are taken.
_ALL_RECORDS = 500


@app.command()
def longbench(
    model: ModelOption,
    data: Annotated[str, typer.Option(help='Folder of LongBench\'s .jsonl files, its data.zip, or "hub".')],
    policy: PolicyOption = ["snapkv"],  # noqa: B006  (typer copies it)
    budget: BudgetOption = ["1024"],  # noqa: B006
    tasks: Annotated[list[str] | None, typer.Option(help="Tasks; without any, all of them.")] = None,
    more: Annotated[list[str] | None, typer.Argument(metavar="[TASK]...", help="More tasks.")] = None,
    length: Annotated[list[int], typer.Option(min=1, help="LongBench's max_length, in tokens.")] = [3500],  # noqa: B006
    e: Annotated[bool, typer.Option("--e", help="LongBench-E: 13 tasks, scores by length.")] = False,
    prompts: Annotated[str | None, typer.Option(help="Folder with LongBench's dataset2prompt.json.")] = None,
    compat: Annotated[bool, typer.Option(help="Keep the faults of the published measures.")] = True,
    examples: ExamplesOption = None,
    query_agnostic: AgnosticOption = False,
    random: RandomOption = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    set_: SetOption = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run LongBench, or continue a run, and print the scores in percent, as LongBench reports them."""
    with errors_as_exit_codes():
        names = _task_names([*(tasks or []), *(more or [])], extended=e)
        params = {"data": data, "compat": compat, **({"prompts": prompts} if prompts else {})}
        point = {"lengths_tokens": length, "num_examples": examples or _ALL_RECORDS, "params": params}
        quick = QuickRun(
            name="longbench",
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
        quick.run([{"name": name, **point} for name in names], _conclude)


def published_scores(rows: Iterable[Row]) -> dict[str, dict[str, Any]]:
    """Scores as LongBench reports them: 100 times the mean, two decimals, by policy, then by task.

    A task of LongBench-E has one score for each length bucket that holds examples. A cell with a failed row has none.
    """
    scores: dict[str, dict[str, dict[str, list[float]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    failed, found = set(), [(row, Cell(**row.cell)) for row in rows]
    setting = settings_of(cell for _, cell in found)
    for row, cell in found:
        run = f"{cell.label}, {cell.length_tokens} tokens{setting(cell)}"
        bucket = str(row.example.get("length_bucket", ""))
        if row.quality is None:
            failed.add((run, cell.task))
        else:
            scores[run][cell.task][bucket].append(row.quality.score)
    return {
        run: {task: _percent(found) for task, found in by_task.items() if (run, task) not in failed}
        for run, by_task in scores.items()
    }


def _percent(by_bucket: dict[str, list[float]]) -> Any:
    means = {bucket: round(100 * sum(found) / len(found), 2) for bucket, found in by_bucket.items()}
    if "" in means:
        return means[""]
    return {bucket: means[bucket] for bucket in LENGTH_BUCKETS if bucket in means}


def _conclude(directory: RunDirectory) -> None:
    scores, path = published_scores(directory.rows()), directory.path / "longbench.json"
    path.write_text(json.dumps(scores, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    for run, by_task in scores.items():
        typer.echo(f"\n{run}")
        for task, score in by_task.items():
            typer.echo(f"  {task}: {score}")
    typer.echo(f"\nwritten: {path}")


def _task_names(asked: Sequence[str], *, extended: bool) -> list[str]:
    known = [task for task, spec in LONGBENCH_TASKS.items() if spec.extended or not extended]
    for task in asked:
        if task not in known:
            family = "LongBench-E" if extended else "LongBench"
            raise ConfigError(f"{family} has no task {task!r}; it has {', '.join(known)}.{did_you_mean(task, known)}")
    return [f"longbench_{'e_' if extended else ''}{task}" for task in asked or known]


if __name__ == "__main__":
    app()
