"""Argument checks shared by the records of this room; each raises a full sentence."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import ConfigError, KVPolicyError, did_you_mean

__all__ = ["check_choice", "check_int", "check_text"]


def check_int(name: str, value: object, *, minimum: int = 0, error: type[KVPolicyError] = ConfigError) -> None:
    """Raise `error` unless `value` is an int (bool excluded) of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise error(
            f"{name} must be a whole number of at least {minimum}, but {value!r} "
            f"({type(value).__name__}) was given. Pass a Python int."
        )
    if value < minimum:
        raise error(f"{name} must be at least {minimum}, but {value} was given. Pass a larger number.")


def check_choice(name: str, value: object, allowed: Sequence[str], *, error: type[KVPolicyError] = ConfigError) -> None:
    """Raise `error` unless `value` is one of the `allowed` words."""
    if not isinstance(value, str) or value not in allowed:
        hint = did_you_mean(value, allowed)
        raise error(f"{name} must be one of {', '.join(allowed)}, but {value!r} was given.{hint}")


def check_text(name: str, value: object, *, error: type[KVPolicyError] = ConfigError) -> None:
    """Raise `error` unless `value` is a non-empty string."""
    if not isinstance(value, str) or not value:
        raise error(f"{name} must be a non-empty string, but {value!r} was given. Name it.")
