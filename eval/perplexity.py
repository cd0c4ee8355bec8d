"""`python -m hf_kvpolicy.eval.perplexity`: perplexity of a text's continuation, one token at a time, under policies."""

from __future__ import annotations

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
    ExamplesOption,
    ModelOption,
    OutOption,
    PolicyOption,
    QuickRun,
    RandomOption,
    SetOption,
)
from .run_directory import RunDirectory

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_TEXTS = ("sotu", "pydoc")


@app.command(cls=ListCommand)
def perplexity(
    model: ModelOption,
    policy: PolicyOption = ["snapkv"],  # noqa: B006  (typer copies it)
    budget: BudgetOption = ["256"],  # noqa: B006
    lengths: LengthsOption = [1000],  # noqa: B006
    continuation: Annotated[int, typer.Option(min=1, help="Tokens fed one at a time.")] = 128,
    text: Annotated[str, typer.Option(help="sotu, pydoc, or a text file or folder.")] = "pydoc",
    examples: ExamplesOption = None,
    query_agnostic: AgnosticOption = False,
    random: RandomOption = True,
    dtype: DtypeOption = "auto",
    device: DeviceOption = "cpu",
    set_: SetOption = None,
    out: OutOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Run the texts, or continue a run, and print the perplexity of every policy."""
    with errors_as_exit_codes():
        own = text not in _TEXTS
        task = {
            "name": "perplexity" if own else f"perplexity_{text}",
            "lengths_tokens": lengths,
            "num_examples": examples or 10,
            "params": {"continuation_tokens": continuation, **({"text": text} if own else {})},
        }
        quick = QuickRun(
            name="perplexity",
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
        quick.run([task], _print_perplexities)


def _print_perplexities(directory: RunDirectory) -> None:
    """Every token weighs alike."""
    from .cells import settings_of
    from .summary import summarise

    summaries = summarise(directory.rows())
    setting = settings_of(summary.cell for summary in summaries)
    for summary in summaries:
        found = summary.status if summary.measured is None else f"{summary.measured.perplexity:.2f}"
        where = f"{summary.cell.task} {summary.cell.length_tokens} tokens{setting(summary.cell)}"
        typer.echo(f"{where}, {summary.cell.label}: perplexity {found}")


if __name__ == "__main__":
    app()
