"""`kvpolicy eval compare DIR [DIR2]` and `kvpolicy eval explain A B`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from .comparison_table import Comparison
    from .results import Result

__all__ = ["add_commands"]

_TIME = ("prefill", "decode")
_LABELS_SHOWN = 6


def add_commands(app: typer.Typer, errors_as_exit_codes: Callable[[], AbstractContextManager[None]]) -> None:
    """Add the commands to the app of `kvpolicy eval`, whose way of failing they share."""

    @app.command()
    def compare(
        source: Annotated[Path, typer.Argument(help="Folder that `run` wrote, or file that `pack` wrote.")],
        other: Annotated[Path | None, typer.Argument(help="A second one; cells of one name are compared.")] = None,
        metric: Annotated[str, typer.Option(help="score, nll, bytes or time.")] = "score",
        cell: Annotated[list[str] | None, typer.Option(help="Only these cells, by key or label; all pairs.")] = None,
        every: Annotated[bool, typer.Option("--every-pair", help="All pairs of a task and length.")] = False,
        ranked: Annotated[bool, typer.Option("--rank", help="Rank the cells, or say why they cannot be.")] = False,
    ) -> None:
        """Compare policies example by example where their coordinates allow it, and say where they do not."""
        with errors_as_exit_codes():
            results = _read([source] if other is None else [source, other])
            if cell:
                results = [result for name in cell for result in _named(name, results)]
            for name in _TIME if metric == "time" else (metric,):
                if ranked:
                    _print_ranking(results, name)
                else:
                    _print_comparisons(results, name, every=every or bool(cell))

    @app.command()
    def explain(
        ours: Annotated[str, typer.Argument(metavar="A", help="SOURCE:CELL, the cell by key or label.")],
        theirs: Annotated[str, typer.Argument(metavar="B", help="Another one; without SOURCE: in that of A.")],
    ) -> None:
        """Say which coordinates of two results differ, and what is therefore not comparable."""
        with errors_as_exit_codes():
            from .explanation import explain as explanation

            first, source = _find(ours, default="")
            second, _ = _find(theirs, default=source)
            typer.echo(f"A: {first.source}: {_name(first)}\nB: {second.source}: {_name(second)}")
            typer.echo("\n".join(explanation(first.coordinates, second.coordinates).lines()))


def _read(paths: Iterable[Path]) -> list[Result]:
    from .results import open_run, results_of

    return [result for path in paths for result in results_of(open_run(path))]


def _name(result: Result) -> str:
    return f"{_point(result)}, {result.label}"


def _point(result: Result) -> str:
    return f"{result.summary.cell.task}, {result.summary.cell.length_tokens} tokens"


def _print_comparisons(results: list[Result], metric: str, *, every: bool) -> None:
    from .comparison import metric_named
    from .comparison_table import comparisons, pairs_to_compare
    from .statistics import SMOKE_BELOW

    unit = metric_named(metric).unit
    found = comparisons(pairs_to_compare(results, every=every), metric)
    allowed = [item for item in found if item.difference is not None]
    several = len({result.source for result in results}) > 1
    typer.echo(f"{metric} ({unit}), differences with 95% intervals, raw p and Holm's over {len(allowed)} pairs")
    typer.echo(f"smoke: fewer than {SMOKE_BELOW} examples; shows that things run, supports no claim")
    for point, group in groupby(found, key=lambda item: _point(item.ours)):
        items = list(group)
        refused = [item for item in items if item.difference is None]
        rows = [_cells(item, several=several) for item in items if item.difference is not None]
        typer.echo("\n".join(["", point, *_aligned(rows)]))
        if refused:
            typer.echo("not comparable:")
        for item in refused:
            reasons = "; ".join(map(str, item.comparability.differing))
            typer.echo(f"  {_pair(item, several=several)}: {reasons}")
    unmeasured = [result for result in results if result.summary.measured is None]
    if unmeasured:
        typer.echo("\nno result:")
    for result in unmeasured:
        typer.echo(f"  {_name(result)}: {result.summary.status} ({result.summary.reason})")


def _pair(item: Comparison, *, several: bool) -> str:
    both = (item.ours, item.theirs)
    return " - ".join(f"{Path(one.source).name}: {one.label}" if several else one.label for one in both)


def _cells(item: Comparison, *, several: bool) -> list[str]:
    notes: list[str] = [] if item.comparability.relation == "comparable" else [item.comparability.relation]
    notes += [] if item.difference is None or item.difference.supports_absence else ["smoke"]
    note = f"({', '.join(notes)})" if notes else ""
    return [f"  {_pair(item, several=several)}", f"p {item.p:.2g}", f"Holm {item.adjusted_p:.2g}", item.verdict, note]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _print_ranking(results: list[Result], metric: str) -> None:
    from .comparison import metric_named, rank

    wanted, ordered = metric_named(metric), rank(results, metric)
    typer.echo(f"{metric} ({wanted.unit}), best mean first; whether two differ is what their interval says")
    for place, result in enumerate(ordered, start=1):
        values = wanted.values(result).values()
        typer.echo(f"{place}. {result.label}: {sum(values) / len(values):.3f}, n = {len(values)}")


def _named(name: str, results: Sequence[Result]) -> list[Result]:
    """The results of that key or label.

    Raises:
        ConfigError: there is none.
    """
    found = [result for result in results if name in result.cell_keys or name == result.label]
    if not found:
        labels = list(dict.fromkeys(result.label for result in results))
        raise ConfigError(f"{name!r} names no cell. Labels are {_shortened(labels)}.{did_you_mean(name, labels)}")
    return found


def _find(text: str, *, default: str) -> tuple[Result, str]:
    """The one result that SOURCE:CELL names, and the source.

    Raises:
        ConfigError: no source is named, or none or several of its cells are meant.
    """
    source, separator, wanted = text.rpartition(":")
    source = source if separator else default
    if not source:
        raise ConfigError(
            f"{text!r} names no folder or file to look in. Write SOURCE:CELL, for example "
            "'runs/first:snapkv @ 64'; a cell is named by its key or its label."
        )
    found = _named(wanted, _read([Path(source)]))
    if len(found) > 1:
        raise ConfigError(f"{wanted!r} names several cells of {source}. Give the key of one: {_listed(found)}.")
    return found[0], source


def _shortened(labels: Sequence[str]) -> str:
    """The first few, and how many more the report has."""
    shown = ", ".join(labels[:_LABELS_SHOWN])
    more = len(labels) - _LABELS_SHOWN
    return f"{shown}, and {more} more that `kvpolicy eval report` prints" if more > 0 else shown


def _listed(results: Iterable[Result]) -> str:
    return "; ".join(f"{min(result.cell_keys)} {_name(result)}" for result in results)
