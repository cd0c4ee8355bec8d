"""The soak script: it leads lives, repeats them by seed, and names what led to a failure."""

from __future__ import annotations

import random
from typing import Any

import pytest
import soak


def test_lives_of_a_policy_are_sound(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak.main(["--policies", "h2o", "--operations", "40", "--length", "20", "--seed", "3"]) == 0
    assert "h2o: 40 operations from seed 3" in capsys.readouterr().out


def test_a_seed_repeats_a_life() -> None:
    lives = [[soak.draw(generator) for _ in range(50)] for generator in (random.Random(7), random.Random(7))]
    assert lives[0] == lives[1]
    assert len({name for name, _, _ in lives[0]}) > 5


def test_a_failure_names_the_seed_and_the_operations(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails_at_columns(self: Any, cache: Any) -> None:
        assert self.fed < 12, "a fault"

    monkeypatch.setattr("oracle.Oracle.check", fails_at_columns)
    assert soak.main(["--policies", "full", "--operations", "60", "--seed", "5"]) == 1
    printed = capsys.readouterr()
    assert "seed 5, operation" in printed.out
    assert "[('feed', 7, 0)," in printed.out
    assert "a fault" in printed.err
