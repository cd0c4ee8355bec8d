"""Answers that are longer than what is generated: said once while a task point runs, and in its report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("evaluate")

from eval_fakes import fake_builder, made_row, tiny_loaded

from hf_kvpolicy.eval.answer_room import answer_room_note, answer_room_notes
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep


def note(**changes: object) -> str | None:
    asked = {"answer_tokens": [5, 9], "values": [("a", "b")] * 2, "metric": "string_match_all", "max_new_tokens": 8}
    return answer_room_note("task 640 tokens", **{**asked, **changes})  # type: ignore[arg-type]


def test_only_answers_that_do_not_fit_are_noted() -> None:
    assert str(note()).startswith("task 640 tokens: answers of 2 values take up to 9 tokens, and max_new_tokens is 8.")
    assert "values" not in str(note(metric="string_match_part")), "these are wordings of one"
    assert note(max_new_tokens=9) is None
    assert note(max_new_tokens=0) is None, "nothing is generated"


def test_a_run_says_it_once_a_task_point_and_its_report_again(tmp_path: Path) -> None:
    # One token a byte: a code of seven digits and the space before it.
    task = {"name": "needle_single_noise", "lengths_tokens": [600, 700], "depths": [0.5], "num_examples": 2}
    document = {"model": "tiny", "tasks": [task], "policies": ["full"], "max_new_tokens": 4}
    for attempt, expected in enumerate((2, 0)):
        said: list[str] = []
        run_sweep(parse_sweep(document), tiny_loaded(), RunDirectory(tmp_path), fake_builder, say=said.append)
        found = [line for line in said if "max_new_tokens is 4" in line]
        assert len(found) == expected, f"attempt {attempt}: what is done before is not warned of again"
    rows = RunDirectory(tmp_path).rows()
    assert [text.partition(":")[0] for text in answer_room_notes(rows)] == [
        "needle_single_noise 600 tokens",
        "needle_single_noise 700 tokens",
    ]


def test_rows_without_an_answer_are_passed_over() -> None:
    row = made_row("full", 0)
    short = replace(row, cell={**row.cell, "max_new_tokens": 6})
    assert len(answer_room_notes([short])) == 1
    assert answer_room_notes([replace(short, quality=None), row]) == []
