"""Options that take several values at once: `--lengths 1000 2000`, as users of other harnesses write them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer
import typer.core

__all__ = ["LengthsOption", "ListCommand", "one_value_each"]

LengthsOption = Annotated[
    list[int], typer.Option("--lengths", "--length", min=1, help="Tokens of a prompt with what follows it.")
]


class ListCommand(typer.core.TyperCommand):
    """A command without positional arguments: further values after an option belong to that option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse after repeating options in front of their further values."""
        return super().parse_args(ctx, one_value_each(args))


def one_value_each(arguments: Iterable[str]) -> list[str]:
    """The same arguments with every option repeated in front of each of its values after the first."""
    found: list[str] = []
    option, has_value = "", False
    for argument in arguments:
        if argument.startswith("--"):
            option, has_value = argument.partition("=")[0], "=" in argument
        elif option:
            if has_value:
                found.append(option)
            has_value = True
        found.append(argument)
    return found
