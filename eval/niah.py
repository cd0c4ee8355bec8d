"""`python -m hf_kvpolicy.eval.niah`: the needle heat map, length by depth, under cache policies."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated

import typer

from .cli import errors_as_exit_codes
from .list_options import LengthsOption, ListCommand
from .quick import (
    AgnosticOption,
    BudgetOption,
    DeviceOption,
    DryRunOption,
    DtypeOption,
    ModelOption,
    OutOption,
    PolicyOption,
    QuickRun,
    RandomOption,
    SetOption,
)
from .run_directory import RunDirectory
from .tasks.heatmap import NEEDLES_PER_CELL

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TEXTS = ("sotu", "pydoc")


@app.command(cls=ListCommand)
def niah(
    model: ModelOption,
    policy: PolicyOption = ["snapkv"],  # noqa: B006  (typer copies it)
    budget: BudgetOption = ["256"],  # noqa: B006
    lengths: LengthsOption = [1000, 2000],  # noqa: B006
    depths: Annotated[list[float], typer.Option(min=0, max=1, help="Where the needle lies.")] = [0, 0.25, 0.5, 0.75, 1],  # noqa: B006
    haystack: Annotated[str, typer.Option(help="sotu, pydoc, or a text file or folder.")] = "pydoc",
    examples: Annotated[int, typer.Option(min=NEEDLES_PER_CELL, help="Needles in every cell.")] = NEEDLES_PER_CELL,
    query_agnostic: AgnosticOption = False,
    random: RandomOption = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    set_: SetOption = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run the map, or continue a run, and print one map a policy."""
    with errors_as_exit_codes():
        own = haystack not in _TEXTS
        task = {
            "name": "niah" if own else f"niah_{haystack}",
            "lengths_tokens": lengths,
            "depths": depths,
            "num_examples": examples * len(depths),
            **({"params": {"haystack": haystack}} if own else {}),
        }
        quick = QuickRun(
            name="niah",
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
        quick.run([task], _print_maps)


def _print_maps(directory: RunDirectory) -> None:
    """Mean scores: a line a depth, a column a length; one map for all rows that were asked alike."""
    from .cells import Cell, settings_of

    maps: dict[str, dict[tuple[float, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    found = [(row, Cell(**row.cell)) for row in directory.rows() if row.quality is not None]
    setting, several = settings_of(cell for _, cell in found), len({cell.task for _, cell in found}) > 1
    for row, cell in found:
        place = float(row.example["depth_ratio"]), cell.length_tokens
        title = f"{f'{cell.task}, ' if several else ''}{cell.label}{setting(cell)}"
        maps[title][place].append(row.quality.score if row.quality else 0.0)
    for label, scores in maps.items():
        lengths = sorted({length for _, length in scores})
        typer.echo(f"\n{label}\n  depth" + "".join(f"{length:>8}" for length in lengths))
        for depth in sorted({depth for depth, _ in scores}):
            cells = (scores.get((depth, length)) for length in lengths)
            means = (f"{sum(found) / len(found):8.2f}" if found else f"{'-':>8}" for found in cells)
            typer.echo(f"{depth:>7.2f}" + "".join(means))


if __name__ == "__main__":
    app()
