"""`kvpolicy eval sensitivity`: what one input of a small workload changes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Annotated

import typer

from ..errors import ConfigError

__all__ = ["add_commands"]


def add_commands(app: typer.Typer, errors_as_exit_codes: Callable[[], AbstractContextManager[None]]) -> None:
    """Add the command to the app of `kvpolicy eval`, whose way of failing it shares."""

    @app.command()
    def sensitivity(
        control: Annotated[str | None, typer.Option(help="The one input to change, such as prompt_rows.")] = None,
        value: Annotated[str | None, typer.Option(help="Its value, in YAML: 64, or [28, 22, 18, 12].")] = None,
    ) -> None:
        """Change one input of a small workload at a time and print which derived values follow, by formula."""
        with errors_as_exit_codes():
            _print(control, value)


def _print(control: str | None, value: str | None) -> None:
    import yaml

    from .sensitivity import BASE, ONE_CONTROL_CASES, derive, lines_of, probe, text_of

    if (control is None) != (value is None):
        raise ConfigError("--control and --value go together: an input, and what it is changed to.")
    cases = ONE_CONTROL_CASES if control is None else {control: yaml.safe_load(value or "")}
    probes = [probe(name, changed) for name, changed in cases.items()]
    typer.echo("base, by formula (nothing is measured):")
    for name, found in derive(BASE).items():
        typer.echo(f"  {name}: {text_of(found)}")
    for found in probes:
        typer.echo("\n".join(["", *lines_of(found)]))
