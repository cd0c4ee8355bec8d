"""A packed run is the run: the same rows, the same report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

from eval_fakes import made_row
from test_eval_report import RUN, folder_with
from typer.testing import CliRunner

from hf_kvpolicy.errors import IntegrityError
from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.packed import PackedRun, write_packed

ROWS = [
    *[made_row("full", index) for index in range(3)],
    *[made_row("snapkv", index, budget=64) for index in range(2)],
    made_row("snapkv", 2, budget=64, status="failed: x", reason="why", quality=None, cache=None, timing=None),
]


def test_rows_and_run_come_back(tmp_path: Path) -> None:
    write_packed({**RUN, "model_source": "/a/folder/of/this/machine"}, ROWS, tmp_path / "run.json")
    packed = PackedRun(tmp_path / "run.json")
    assert packed.rows() == ROWS
    assert packed.read_run() == RUN


def test_examples_that_were_asked_in_several_ways_and_caches_that_were_never_built_come_back(tmp_path: Path) -> None:
    """An example has one id with its text and without, and other tokens."""
    declared = {"policy": "snapkv", "budget": 64}
    rows = [
        *(made_row("full", index) for index in range(2)),
        *(
            replace(row, example={**row.example, "prompt_tokens": 40 + row.example["index"]})
            for row in (made_row("no_context", index) for index in range(2))
        ),
        made_row("snapkv", 0, budget=64, status="failed: x", quality=None, cache=None, timing=None),
        replace(made_row("snapkv", 1, budget=64), policy=declared),
    ]
    write_packed(RUN, rows, tmp_path / "run.json")
    assert PackedRun(tmp_path / "run.json").rows() == rows


def test_the_report_of_a_packed_run_is_that_of_its_folder(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    other.mkdir()
    folder_with(ROWS, folder)
    for arguments in (
        ["pack", folder, tmp_path / "run.json"],
        ["report", folder],
        ["report", tmp_path / "run.json", "--out", other],
    ):
        result = CliRunner().invoke(app, [str(argument) for argument in arguments])
        assert result.exit_code == 0, result.output
    assert (folder / "report.md").read_text() == (other / "report.md").read_text()


def test_a_packed_run_is_printed_without_writing_beside_it(tmp_path: Path) -> None:
    write_packed(RUN, ROWS, tmp_path / "run.json")
    result = CliRunner().invoke(app, ["report", str(tmp_path / "run.json")])
    assert result.exit_code == 0, result.output
    assert "snapkv" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"packed_schema_version": 99}'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(IntegrityError, match="eval pack"):
        PackedRun(tmp_path / "run.json").rows()
