"""Folders that are damaged, full, shared or of another shape: one line says what is wrong, and nothing is lost."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

import typer
from eval_fakes import fake_builder, made_row, tiny_loaded
from test_eval_killed import forked
from test_eval_report import folder_with, full
from typer.testing import CliRunner

from hf_kvpolicy.errors import ConfigError, IntegrityError
from hf_kvpolicy.eval import run_directory
from hf_kvpolicy.eval.cli import app, errors_as_exit_codes
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep
from hf_kvpolicy.eval.tasks.base import Example, to_dataset

SWEEP: dict[str, Any] = {
    "model": "tiny",
    "budgets": [64],
    "max_new_tokens": 2,
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.5], "num_examples": 2}],
    "policies": ["snapkv"],
}


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def samples_of(folder: Path) -> Path:
    (found,) = folder.glob("cells/*/samples.0.jsonl")
    return found


# Characters that `str.splitlines` takes for line ends; JSON leaves all but the last unescaped.
@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b"])
def test_an_answer_may_hold_what_looks_like_a_line_end(tmp_path: Path, separator: str) -> None:
    (row,) = full(1)
    assert row.quality is not None
    answered = replace(row, quality=replace(row.quality, output_text=f"a{separator}b"))
    (found,) = folder_with([answered], tmp_path).rows()
    assert found == answered


def test_a_line_that_is_torn_inside_a_letter_is_left_out(tmp_path: Path) -> None:
    directory = folder_with(full(2), tmp_path)
    with samples_of(tmp_path).open("ab") as stream:
        stream.write('{"answer": "é'.encode()[:-1])
    assert directory.rows() == full(2)


@pytest.mark.parametrize(
    "line",
    [
        b"{torn",
        b"[1]",
        b"{}",
        b"\0" * 40,
        b'{"\xff": 1}',
        json.dumps({"schema_version": 2, "quality": {"colour": 1}}).encode(),
        json.dumps({"schema_version": 2}).encode(),
    ],
)
def test_a_damaged_line_is_named_with_the_remedy(tmp_path: Path, line: bytes) -> None:
    folder_with(full(2), tmp_path)
    samples_of(tmp_path).write_bytes(samples_of(tmp_path).read_bytes() + line + b"\n")
    code, text = invoke("report", tmp_path)
    assert code == 2
    assert "samples.0.jsonl, line 3 cannot be read" in text
    assert "Delete the line to have its example run again" in text


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff"])
@pytest.mark.parametrize("name", ["run.json", "cell.json"])
def test_a_damaged_record_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    folder_with(full(1), tmp_path)
    (path,) = tmp_path.rglob(name)
    path.write_bytes(content)
    for command in ("report", "compare"):
        code, text = invoke(command, tmp_path)
        assert code == 2
        assert f"{name} is damaged" in text


def test_a_description_that_is_gone_and_a_damaged_environment_are_named(tmp_path: Path) -> None:
    folder_with(full(1), tmp_path)
    (place,) = (tmp_path / "environments").iterdir()
    place.write_text("{")
    assert f"environments/{place.name} is damaged" in invoke("report", tmp_path)[1]
    place.write_text("{}")
    (samples_of(tmp_path).parent / "cell.json").unlink()
    assert "cell.json is damaged" in invoke("report", tmp_path)[1]


def test_a_packed_run_without_its_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"packed_schema_version": 2}))
    code, text = invoke("report", tmp_path / "run.json")
    assert code == 2
    assert "is damaged: it holds no 'run'" in text


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "file"
    folder_with(full(1), folder)
    file.write_text("")
    for arguments in (("report", folder, "--out", file / "in"), ("pack", folder, tmp_path / "absent" / "run.json")):
        code, text = invoke(*arguments)
        assert code == 2
        assert "error: [Errno" in text
        assert "may be written and has room" in text


def test_a_full_disk_ends_the_run_in_one_line_and_keeps_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded, config = tiny_loaded(), parse_sweep(SWEEP)
    sync, left = os.fsync, 2

    def full_after_two(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size - 9)  # what did not fit
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "samples.0.jsonl")
        sync(descriptor)

    monkeypatch.setattr(run_directory.os, "fsync", full_after_two)
    with pytest.raises(typer.Exit) as ended, errors_as_exit_codes():
        run_sweep(config, loaded, RunDirectory(tmp_path), fake_builder, say=lambda line: None)
    assert ended.value.exit_code == 2
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.setattr(run_directory.os, "fsync", sync)
    assert len(RunDirectory(tmp_path).rows()) == 2
    outcome = run_sweep(config, loaded, RunDirectory(tmp_path), fake_builder, say=lambda line: None)
    assert (outcome.written, outcome.skipped) == (4, 2)


def test_a_part_is_filled_by_one_process(tmp_path: Path) -> None:
    """A second one is refused while the first lives, whatever ends it; another part is not."""
    read, write = os.pipe()

    def hold() -> int:
        with RunDirectory(tmp_path).claimed():
            os.write(write, b".")
            signal.pause()
        return 0

    child = forked(hold)
    try:
        os.read(read, 1)
        with pytest.raises(ConfigError, match="Another process is filling part 1"), RunDirectory(tmp_path).claimed():
            pass
        with RunDirectory(tmp_path, rank=1).claimed():
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with RunDirectory(tmp_path).claimed():
        pass


@pytest.mark.parametrize("missing", [OSError(errno.ENOLCK, "no locks"), None])
def test_without_locks_nothing_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: OSError | None
) -> None:
    import fcntl

    def refuse(descriptor: int, how: int) -> None:
        raise missing or BlockingIOError

    monkeypatch.setattr(fcntl, "flock", refuse)
    if missing is None:
        with pytest.raises(ConfigError), RunDirectory(tmp_path).claimed():
            pass
        return
    with RunDirectory(tmp_path).claimed():
        pass


def test_examples_of_earlier_calls_stay(tmp_path: Path) -> None:
    """Rows refer to them by id."""
    loaded = tiny_loaded()

    def ids(count: int) -> set[str]:
        sweep = {**SWEEP, "tasks": [{**SWEEP["tasks"][0], "num_examples": count}]}
        run_sweep(parse_sweep(sweep), loaded, RunDirectory(tmp_path), fake_builder, say=lambda line: None)
        lines = (tmp_path / "examples" / "needle_single_noise-600-0.jsonl").read_text().splitlines()
        assert len(lines) == len(set(lines))
        return {json.loads(line)["example_id"] for line in lines}

    assert len(ids(1)) == 1
    assert len(ids(3)) == 3
    assert len(ids(2)) == 3
    assert {row.example["id"] for row in RunDirectory(tmp_path).rows()} <= ids(1)


def test_a_coordinate_that_the_first_example_lacks_is_kept() -> None:
    examples = [
        Example(context="c", question="q", answer_prefix="", answers=("a",), coordinates=coordinates)
        for coordinates in ({}, {"source_length": 7})
    ]
    assert to_dataset(examples)["coordinate_source_length"] == [None, 7]


_CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"budgets": [64, 32]}, "budgets changed. 2 of its 5 cells are new here."),
    (
        {"budgets": [32]},
        "budgets changed. 2 of its 3 cells are new here. 2 cells that it does not ask for stay in the folder and in "
        "its reports.",
    ),
    ({"delta": 0.1}, "delta changed. 0 of its 3 cells are new here."),
    ({"seeds": [0, 1]}, "seeds changed. 3 of its 6 cells are new here."),
]


@pytest.mark.parametrize(("change", "words"), _CHANGES)
def test_another_sweep_in_an_old_folder_is_told_of(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    loaded = tiny_loaded()

    def said(**changes: Any) -> list[str]:
        lines: list[str] = []
        directory = RunDirectory(tmp_path)
        run_sweep(parse_sweep({**SWEEP, **changes}), loaded, directory, fake_builder, limit=1, say=lines.append)
        return [line for line in lines if line.startswith("warning: This folder was begun with another sweep")]

    assert said() == []
    assert said() == []
    assert said(model={"name": "moved/tiny"}, threads=1, jobs=1) == []
    (line,) = said(**change)
    assert line == f"warning: This folder was begun with another sweep; {words}"
    assert said(**change) == [], "told once: the folder is of this sweep now"


@pytest.mark.parametrize("damage", [lambda path: path.write_text("{"), lambda path: path.write_text("[]")])
def test_a_run_is_not_continued_over_a_damaged_record(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    loaded = tiny_loaded()
    run_sweep(parse_sweep(SWEEP), loaded, RunDirectory(tmp_path), fake_builder, limit=1, say=lambda line: None)
    damage(tmp_path / "run.json")
    with pytest.raises(IntegrityError, match=r"run\.json is damaged"):
        run_sweep(parse_sweep(SWEEP), loaded, RunDirectory(tmp_path), fake_builder, limit=1, say=lambda line: None)


def test_rows_of_other_fields_are_refused() -> None:
    row = made_row("full", 0)
    values = {**json.loads(row.to_json()), "cell": row.cell, "cell_key": row.cell_key}
    assert type(row).from_mapping(values) == row
    with pytest.raises(IntegrityError, match="does not have the fields"):
        type(row).from_mapping({**values, "colour": "red"})
