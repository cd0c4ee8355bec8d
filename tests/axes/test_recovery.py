"""Which candidate policy is enough for a head."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.allocation import choose_policy
from hf_kvpolicy.errors import ConfigError, SelectionError

ROWS = 6
FULL = ("full", torch.ones(ROWS, dtype=torch.bool))


def mask(*kept: int) -> torch.Tensor:
    return torch.tensor([row in kept for row in range(ROWS)])


@given(
    st.lists(st.integers(0, 16), min_size=ROWS, max_size=ROWS),
    st.dictionaries(st.sampled_from("abcdefg"), st.lists(st.booleans(), min_size=ROWS, max_size=ROWS), max_size=6),
    st.integers(0, 64),
)
@settings(deadline=None, max_examples=400, derandomize=True)
def test_equals_the_plain_search(parts: list[int], candidates: dict[str, list[bool]], threshold: int) -> None:
    """Masses and thresholds are 64ths, so that sums are exact and thresholds are met exactly."""
    candidates = {**candidates, "full": [True] * ROWS}
    enough = []
    for name, keep in candidates.items():
        if sum(part for part, kept in zip(parts, keep, strict=True) if kept) >= threshold:
            enough.append((sum(keep), name))
    rows, name = min(enough, default=(ROWS, "full"))
    masks = [(name, torch.tensor(keep)) for name, keep in candidates.items()]
    choice = choose_policy(torch.tensor(parts) / 64, masks, threshold / 64)
    assert (choice.rows, choice.name) == (rows, name)
    assert choice.keep_N.tolist() == candidates[name]


def test_equal_sizes_go_by_name() -> None:
    masks = [("zebra", mask(0, 1)), FULL, ("ant", mask(0, 2))]
    assert choose_policy(torch.tensor([1.0, 0, 0, 0, 0, 0]), masks, 0.9).name == "ant"


def test_full_recovers_everything_whatever_rounding_says() -> None:
    choice = choose_policy(torch.full((ROWS,), 0.16), [("local", mask(4, 5)), FULL], 1.0)
    assert (choice.name, choice.rows, choice.recovery) == ("full", ROWS, 1.0)


def test_half_precision_mass_is_added_in_float64() -> None:
    tokens = 4096
    everything = torch.ones(tokens, dtype=torch.bool)
    most = everything.clone()
    most[-1] = False
    mass = torch.full((tokens,), 1 / tokens, dtype=torch.bfloat16)
    choice = choose_policy(mass, [("most", most), ("full", everything)], 0.9995)
    assert (choice.name, choice.recovery) == ("most", 1 - 1 / tokens)


@pytest.mark.parametrize(
    ("masks", "threshold", "said"),
    [
        ([("local", mask(5))], 0.9, "fallback"),
        ([FULL, FULL], 0.9, "name of their own"),
        ([], 0.9, "fallback"),
        ([FULL], 1.5, "threshold"),
        ([FULL], float("nan"), "threshold"),
        ([FULL, ("short", torch.ones(3, dtype=torch.bool))], 0.9, "'short'"),
        ([FULL, ("counts", torch.ones(ROWS))], 0.9, "float32"),
    ],
)
def test_refusals(masks: list[tuple[str, torch.Tensor]], threshold: float, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        choose_policy(torch.full((ROWS,), 1 / ROWS), masks, threshold)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0])
def test_mass_that_cannot_be_added_is_refused(bad: float) -> None:
    with pytest.raises(SelectionError, match="finite and not negative"):
        choose_policy(torch.tensor([bad, 0, 0, 0, 0, 0]), [FULL], 0.9)
