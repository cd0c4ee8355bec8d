"""Reading one option of a policy at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import ConfigError, ManifestError

__all__ = ["bounded_only", "check_ratio", "refuse_quantized", "refuse_unused", "token_positions"]

# Options that say something only beside another one, and what they say.
_BESIDE = {"block_rows": ("quantize", "how many rows are quantized together, but no row is")}


def refuse_quantized(policy: str, quantize: str | None) -> None:
    """Reject merged rows in few bits.

    Raises:
        ManifestError: `quantize` is given.
    """
    if quantize is not None:
        raise ManifestError(
            f"{policy}: quantize={quantize!r} does not say which of shared directions, magnitudes and exceptions of "
            "merged layers are quantized, and each is another approximation (0x0DD). Leave it out, or quantize a "
            "policy that keeps rows as they are, such as full or snapkv without merge_layers."
        )


def refuse_unused(policy: str, given: Mapping[str, Any], known: Collection[str] | None = None) -> None:
    """Reject an option that says nothing without another one.

    Args:
        given: options by name; those that are None are not given.
        known: options that the policy has; None for those of this library's policies.

    Raises:
        ConfigError: an option is given and what it is about is not.
    """
    for name, (needed, meaning) in _BESIDE.items():
        if given.get(name) is not None and given.get(needed) is None and (known is None or needed in known):
            raise ConfigError(
                f"{policy}: {name}={given[name]!r} says {meaning}. Give {needed} too, or leave {name} out."
            )


def check_ratio(policy: str, name: str, value: float) -> None:
    """Reject a share outside [0, 1].

    Raises:
        ConfigError: the value is not a number between 0 and 1.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value <= 1.0:
        raise ConfigError(f"{policy}: {name} is a share between 0 and 1; got {value!r}.")


def bounded_only(on_append: str, policy: str) -> str:
    """Return `on_append` of a policy whose budget holds after every step.

    Raises:
        ManifestError: "append" would let a prompt segment exceed the budget.
    """
    if on_append == "append":
        raise ManifestError(
            f"{policy}: the budget holds after every step, but on_append='append' keeps a later prompt segment whole. "
            "Use on_append='recompress', or a policy that decides at the end of a prompt (snapkv)."
        )
    return on_append


def token_positions(protect: Iterable[int] | None, policy: str) -> tuple[int, ...]:
    """Return explicit protected token positions, ascending and without duplicates.

    Raises:
        ConfigError: an entry is not a non-negative whole number.
    """
    wanted: list[Any] = [] if protect is None else list(protect)
    for token in wanted:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigError(
                f"{policy}: protect must list token positions (0 is a row's first real token); got {token!r}. "
                "Give for example protect=range(0, 20) for a system prompt of 20 tokens."
            )
    return tuple(sorted(set(wanted)))
