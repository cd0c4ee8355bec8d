"""Numbers of an allocation as exact fractions: a target that is rounded early can lose or invent a row."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import TypeAlias

from ..errors import ConfigError

__all__ = ["Number", "declared", "shares"]

Number: TypeAlias = int | float | Fraction


def declared(name: str, value: Number) -> Fraction:
    """Return the decimal that was written: 0.1 is one tenth, not its binary neighbour.

    Raises:
        ConfigError: not a finite number.
    """
    try:
        return Fraction(str(value))
    except (ValueError, ZeroDivisionError):
        raise ConfigError(f"{name} must be a finite number, but {value!r} was given. Pass an int or a float.") from None


def shares(name: str, weights: Sequence[Number]) -> list[Fraction]:
    """Return weights divided by their sum.

    Raises:
        ConfigError: no weights, a negative or non-finite one, or nothing but zeros.
    """
    exact = [declared(name, weight) for weight in weights]
    total = sum(exact, Fraction(0))
    if total <= 0 or min(exact) < 0:
        raise ConfigError(
            f"{name} must be non-negative and not all zero to be divided by its sum, but {len(exact)} values with the "
            f"sum {float(total)} and the minimum {float(min(exact, default=Fraction(0)))} were given. "
            "Correct the profile."
        )
    return [weight / total for weight in exact]
