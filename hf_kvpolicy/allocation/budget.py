"""What a user may give as a budget, and how it becomes whole rows per KV head and batch row.

int: rows. float in (0, 1]: share of the real prompt tokens of each batch row, rounded down. "64MiB": bytes of K/V
payload over all compressible layers, KV heads and batch rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ..errors import BudgetError

__all__ = ["NO_LIMIT_ROWS", "Budget", "parse_budget"]

# The budget of an owner that has none; fits the integers of every device.
NO_LIMIT_ROWS = 2**31 - 1

_UNITS_BYTES = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_BYTES_PATTERN = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*$", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A declared budget: exactly one of rows, ratio, payload bytes."""

    kind: Literal["rows", "ratio", "bytes"]
    value: int | float
    declared: int | float | str

    def resolve_rows(
        self, *, prompt_tokens: Sequence[int], owners_per_row: int, row_bytes: int, minimum_rows: int
    ) -> list[int]:
        """Return rows per owner for each batch row.

        Args:
            prompt_tokens: real tokens of each batch row's first prompt.
            owners_per_row: stored owners of one batch row (layers x stored heads).
            row_bytes: bytes of one K/V row pair of one owner.
            minimum_rows: what the policy needs at least (window + 1, sinks + 1).

        Raises:
            BudgetError: a byte budget gives fewer rows than the policy needs.
        """
        if self.kind == "rows":
            return [min(int(self.value), NO_LIMIT_ROWS)] * len(prompt_tokens)
        if self.kind == "ratio":
            # Short prompts must still hold the protected rows: the floor is the policy's minimum.
            # The declared decimal is meant, not its binary neighbour: 0.29 of 100 tokens is 29 rows.
            share = Fraction(str(self.value))
            return [max(minimum_rows, int(share * tokens)) for tokens in prompt_tokens]
        rows = int(self.value) // (owners_per_row * len(prompt_tokens) * row_bytes)
        if rows < minimum_rows:
            needed = minimum_rows * owners_per_row * len(prompt_tokens) * row_bytes
            raise BudgetError(
                f"The byte budget {self.declared!r} gives {rows} rows to each of {owners_per_row} pairs of a layer and "
                f"a head in {len(prompt_tokens)} batch row{'s' * (len(prompt_tokens) > 1)}, but this policy needs at "
                f"least {minimum_rows}. "
                f"Give at least {needed} bytes, or a smaller window."
            )
        return [min(rows, NO_LIMIT_ROWS)] * len(prompt_tokens)


def parse_budget(value: int | float | str) -> Budget:
    """Read a budget as a user gives it.

    Raises:
        BudgetError: not a positive int, a float in (0, 1] or a byte size such as "64MiB".
    """
    allowed = 'Give rows as a positive int, a share of the prompt as a float in (0, 1], or bytes such as "64MiB".'
    if isinstance(value, bool):
        raise BudgetError(f"A budget cannot be a truth value; got {value!r}. {allowed}")
    if isinstance(value, int):
        if value < 1:
            raise BudgetError(f"A budget of {value} rows keeps nothing. {allowed}")
        return Budget(kind="rows", value=value, declared=value)
    if isinstance(value, float):
        if not 0.0 < value <= 1.0:
            raise BudgetError(f"A ratio budget lies in (0, 1]; got {value!r}. {allowed}")
        return Budget(kind="ratio", value=value, declared=value)
    if isinstance(value, str):
        match = _BYTES_PATTERN.match(value)
        if match and match.group(2).lower() in _UNITS_BYTES:
            size_bytes = int(Fraction(match.group(1)) * _UNITS_BYTES[match.group(2).lower()])
            if size_bytes > 0:
                return Budget(kind="bytes", value=size_bytes, declared=value)
        raise BudgetError(f"{value!r} is not a byte size. {allowed}")
    raise BudgetError(f"A budget of type {type(value).__name__} is not understood. {allowed}")
