"""`kvpolicy eval run SWEEP`, `report DIR` and `pack DIR FILE`; the other commands are added from their own files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError, KVPolicyError
from . import cli_compare, cli_sensitivity, cli_tasks, fields
from .execution import EVERYTHING, Execution, execute
from .sweep import NO_CONTEXT, SweepConfig, load_sweep

__all__ = ["app", "default_folder", "errors_as_exit_codes", "run_or_list"]

app = typer.Typer(help="Measure cache policies: quality beside the rows and bytes they really hold.")

_INTERRUPTED = 130


@app.command()
def run(
    sweep: Annotated[Path, typer.Argument(help="Sweep file, or the name of a shipped one, such as smoke.")],
    out: Annotated[Path | None, typer.Option(help="Folder for the results; finished rows in it are kept.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name or folder instead of the sweep's.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="At most N examples a cell.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="Override, such as tasks.0.num_examples=5.")] = None,
    part: Annotated[
        str | None, typer.Option(help="I/N: every N-th example from the I-th; N processes fill one --out.")
    ] = None,
    engine: Annotated[
        str, typer.Option(help="local: this process, and those started with it by a launcher. ray: a Ray cluster.")
    ] = "local",
    workers: Annotated[int | None, typer.Option(min=1, help="Workers of --engine ray, each with a model.")] = None,
    allow_mixed: Annotated[
        bool, typer.Option("--allow-mixed", help="Add to rows that ran with other versions or on other hardware.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the cells and stop.")] = False,
) -> None:
    """Run a sweep, or continue one: rows that are done are not computed again."""
    with errors_as_exit_codes():
        overrides: dict[str, Any] = dict(fields.parse_override(text) for text in set_ or [])
        config = load_sweep(sweep, overrides | ({"model": model} if model else {}))
        how = Execution(
            limit=limit,
            part=_parse_part(part) if part else None,
            allow_mixed=allow_mixed,
            engine=engine,
            workers=workers,
        )
        if run_or_list(config, out or default_folder(sweep.stem), how, dry_run=dry_run):
            raise typer.Exit(1)


@app.command()
def report(
    source: Annotated[Path, typer.Argument(help="Folder that `run` wrote, or file that `pack` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Folder for report.md, .html, .csv and .png.")] = None,
) -> None:
    """Print the tables of a run and write report.md, .html, .csv and .png beside it; of a file only with --out."""
    with errors_as_exit_codes():
        # Before any import: a wrong path matters more than a package that is not installed.
        if not source.exists():
            raise ConfigError(
                f"There is no folder {str(source)!r}. Give the folder that `kvpolicy eval run` wrote, or a file that "
                "`kvpolicy eval pack` wrote."
            )
        from .canary import canary_note
        from .report import FILES, write_report
        from .results import open_run, summaries_of
        from .terminal import print_tables

        opened, into = open_run(source), source if out is None and source.is_dir() else out
        if into is not None:
            into.mkdir(parents=True, exist_ok=True)
        for canary in opened.read_run().get("canaries", {}).values():
            typer.echo(canary_note(canary))
        print_tables(summaries_of(opened) if into is None else write_report(opened, into))
        if into is not None:
            typer.echo("written: " + ", ".join(str(into / name) for name in FILES))


@app.command()
def pack(
    folder: Annotated[Path, typer.Argument(help="Folder that `run` wrote.")],
    file: Annotated[Path, typer.Argument(help="JSON file to write.")],
) -> None:
    """Write a run into one small file, which `report` reads like the folder."""
    with errors_as_exit_codes():
        if not folder.is_dir():
            raise ConfigError(f"There is no folder {str(folder)!r}. Give the folder that `kvpolicy eval run` wrote.")
        from .packed import write_packed
        from .run_directory import RunDirectory

        directory = RunDirectory(folder)
        rows = directory.rows()
        write_packed(directory.read_run(), rows, file)
        typer.echo(f"{len(rows)} rows written: {file}")


def run_or_list(config: SweepConfig, out: Path, how: Execution = EVERYTHING, *, dry_run: bool = False) -> int:
    """Check a sweep without a model, then run it into `out` and return how many rows failed; or list its cells.

    Raises:
        ConfigError: a policy, an option, a grid or an execution that is refused.
        typer.Exit: in a process of a launch that follows another one.
    """
    _check(config)
    how.check()
    if not dry_run:
        return execute(config, out, how, say=typer.echo)
    _print_plan(config, how.limit)
    return 0


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Turn what the library or the system refuses into one line and status 2, and an interrupt into status 130.

    Imports happen inside, so that a missing optional package is one line too.
    """
    try:
        yield
    except KVPolicyError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except BrokenPipeError:
        raise  # who reads the output has seen enough
    except OSError as error:
        typer.echo(
            f"error: {error}. Check that the place exists, may be written and has room. Rows written before are kept; "
            "the same command with the same --out continues.",
            err=True,
        )
        raise typer.Exit(2) from error
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command with the same --out continues", err=True)
        raise typer.Exit(_INTERRUPTED) from None


def _check(config: SweepConfig) -> None:
    """Everything that can be refused without a model: policy names, options, grids of the tasks, budgets in rows.

    Where the model lies in a folder its config is read, for the lengths too.
    """
    from .cells import task_points
    from .engine import check_policies, check_takes_budget
    from .feasible import check_budgets, check_lengths, local_config

    list(task_points(config))
    asked = [policy for policy in config.policies if policy.name != NO_CONTEXT]
    check_policies((policy.name, {**policy.options, **policy.grid}) for policy in asked)
    check_takes_budget(name for policy in asked for name in policy.matched)
    model_config = local_config(config.model.name)
    if model_config is not None:
        check_lengths(config, model_config)
    check_budgets(config, model_config)


def _parse_part(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= index <= count:
        raise ConfigError(f"--part {text!r} is no part of a run. Write it as I/N with I from 1 to N, for example 1/2.")
    return index, count


def _print_plan(config: SweepConfig, limit: int | None) -> None:
    from .cells import cells_at, task_points

    total_cells = total_tokens = 0
    for point in task_points(config):
        examples = min(point.request.num_examples, limit or point.request.num_examples)
        for cell in cells_at(config, point):
            where = f"{cell.task} {cell.length_tokens} tokens, {cell.label}, seed {cell.seed}"
            pending = f", pending on {cell.source.label}" if cell.matched_to is not None else ""
            typer.echo(f"{where}: {examples} examples{pending}")
            total_cells += 1
            total_tokens += examples * cell.length_tokens
    typer.echo(f"{total_cells} cells, about {total_tokens} tokens through the model")


def default_folder(name: str) -> Path:
    """A new folder for the results of a run."""
    return Path("runs") / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


cli_compare.add_commands(app, errors_as_exit_codes)
cli_sensitivity.add_commands(app, errors_as_exit_codes)
cli_tasks.add_commands(app, errors_as_exit_codes)
