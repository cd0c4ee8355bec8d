"""The script that times a shared prefill: what it runs, and the ratios that it takes of the seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("evaluate")

from eval_fakes import tiny_loaded
from shared_prefill import Parts, Seconds, capture, measures_of, rounds_of

from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.tasks.base import Example

DOCUMENT: dict[str, Any] = {
    "model": "tiny",
    "budgets": [48],
    "max_new_tokens": 3,
    "include_random": False,
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.5], "num_examples": 3}],
    "policies": ["snapkv", "h2o"],
}


def test_every_example_but_the_first_is_run_in_all_three_ways(tmp_path: Path) -> None:
    rounds = rounds_of(tiny_loaded(), DOCUMENT, tmp_path)
    assert len(rounds) == 2
    for seconds in rounds:
        assert set(seconds) == {"shared", "run a cell", "prefill", "selection", "decode"}
        assert all(value.wall > 0 and value.cpu > 0 for value in seconds.values())
    shared, apart = (RunDirectory(tmp_path / name).rows() for name in ("shared", "run a cell"))
    assert (len(shared), len(apart)) == (3 * 3, 2 * 3)
    assert {row.status for row in (*shared, *apart)} == {"ok"}
    assert {row.timing.selection_s is None for row in shared if row.timing} == {False}
    assert {row.timing.selection_s is None for row in apart if row.timing} == {True}


def test_ratios_are_taken_within_an_example() -> None:
    names = ("shared", "run a cell", "prefill", "selection", "decode")
    walls = ((11.0, 55.0, 4.0, 1.0, 5.0), (24.0, 72.0, 8.0, 2.0, 10.0))
    rounds = [{name: Seconds(wall, wall / 2) for name, wall in zip(names, each, strict=True)} for each in walls]
    above, gain, cpu_above, cpu_gain = measures_of(rounds, "case")
    assert above.details["ratios"] == pytest.approx([1.1, 1.2])
    assert above.value == cpu_above.value == pytest.approx(1.15)
    assert gain.value == cpu_gain.value == pytest.approx(4.0)
    assert (above.target, gain.target, cpu_above.target) == (1.15, None, None)


def test_a_policy_that_runs_its_own_prefill_is_refused() -> None:
    loaded = tiny_loaded()
    example = Example(context="Text. " * 30, question="What?", answer_prefix="It is", answers=("42",))
    encoded = PromptEncoder(loaded.tokenizer).encode(example)
    cell = Cell(task="any", length_tokens=300, policy="pyramidinfer", budget=48)
    with pytest.raises(SystemExit, match="runs its own prefill"):
        Parts(loaded, [cell]).seconds(encoded, capture(loaded, encoded))
