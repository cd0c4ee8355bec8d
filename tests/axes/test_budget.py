"""What may be given as a budget and how it becomes whole rows."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.allocation import Budget, parse_budget
from hf_kvpolicy.errors import BudgetError


def rows(budget: object, prompts: list[int], *, owners: int = 8, row_bytes: int = 256, minimum: int = 1) -> list[int]:
    parsed = parse_budget(budget)  # type: ignore[arg-type]
    return parsed.resolve_rows(prompt_tokens=prompts, owners_per_row=owners, row_bytes=row_bytes, minimum_rows=minimum)


@pytest.mark.parametrize(
    ("given_value", "kind", "value"),
    [
        (1, "rows", 1), (1024, "rows", 1024), (0.5, "ratio", 0.5), (1.0, "ratio", 1.0), (1e-9, "ratio", 1e-9),
        ("64MiB", "bytes", 64 * 2**20), ("64 mib", "bytes", 64 * 2**20), (" 1.5 GiB ", "bytes", 3 * 2**29),
        ("10kB", "bytes", 10_000), ("2KiB", "bytes", 2048), ("3MB", "bytes", 3_000_000), ("1GB", "bytes", 10**9),
        ("512B", "bytes", 512), ("1b", "bytes", 1), ("0.5KiB", "bytes", 512),
    ],
)  # fmt: skip
def test_accepted_forms(given_value: int | float | str, kind: str, value: float) -> None:
    assert parse_budget(given_value) == Budget(kind=kind, value=value, declared=given_value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "refused",
    [
        0, -1, True, False, 0.0, -0.5, 1.0000001, 2.0, float("nan"), float("inf"), "", "64", "MiB", "-1MiB", "0MiB",
        "0.4B", "64MiB/s", "64 Mi", "1e3MiB", "64TiBB", "half", "1,5GiB", None, [512], {"rows": 5}, 1j,
    ],
)  # fmt: skip
def test_refused_forms_say_what_is_allowed(refused: object) -> None:
    with pytest.raises(BudgetError, match="MiB"):
        parse_budget(refused)  # type: ignore[arg-type]


def test_decimal_byte_sizes_are_exact() -> None:
    wrong = {}
    for number in range(1000):
        assert parse_budget(f"{1000 + number}b").value == 1000 + number
        text = f"1.{number:03}kB"
        if parse_budget(text).value != 1000 + number:
            wrong[text] = parse_budget(text).value
    assert not wrong


@pytest.mark.parametrize("length", range(1, 301, 23))
def test_rows_ignore_the_prompt(length: int) -> None:
    for budget in range(1, length + 2):
        assert rows(budget, [length, 1]) == [budget, budget]


def test_a_ratio_is_the_floor_of_what_was_declared() -> None:
    prompts = list(range(1, 301))
    wrong = {}
    for percent in range(1, 101):
        got = rows(percent / 100, prompts, minimum=1)
        for prompt, count in zip(prompts, got, strict=True):
            if count != max(1, percent * prompt // 100):
                wrong[percent / 100, prompt] = count
    assert not wrong


@pytest.mark.parametrize("minimum", [1, 2, 33])
@pytest.mark.parametrize("owners", [1, 6, 80 * 8])
def test_bytes_are_floored_per_owner_and_never_exceeded(owners: int, minimum: int) -> None:
    for batch in (1, 2, 5):
        for size in range(1, 40):
            total = size * owners * batch * 256
            if size < minimum:
                with pytest.raises(BudgetError, match=str(minimum * owners * batch * 256)):
                    rows(f"{total}B", [300] * batch, owners=owners, minimum=minimum)
                continue
            assert rows(f"{total}B", [300] * batch, owners=owners, minimum=minimum) == [size] * batch
            assert rows(f"{total + 255}B", [300] * batch, owners=owners, minimum=minimum) == [size] * batch
            if size - 1 >= minimum:
                assert rows(f"{total - 1}B", [300] * batch, owners=owners, minimum=minimum) == [size - 1] * batch


@given(st.integers(1, 10**7), st.integers(1, 80), st.integers(1, 16), st.integers(1, 4))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_bytes_use_what_they_may(size: int, layers: int, heads: int, batch: int) -> None:
    row_bytes = 64 * 2 * 2
    unit = layers * heads * batch * row_bytes
    try:
        got = rows(f"{size}b", [10] * batch, owners=layers * heads, row_bytes=row_bytes)
    except BudgetError:
        assert size < unit
        return
    assert got[0] * unit <= size < (got[0] + 1) * unit


def test_a_ratio_never_starves_the_protected_rows() -> None:
    for length in range(1, 301):
        assert rows(0.1, [length], minimum=5) == [max(5, int(Fraction(1, 10) * length))]
