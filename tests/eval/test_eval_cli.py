"""The commands end to end, on a tiny model saved to disk and the real cache engine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml
from eval_fakes import tiny_loaded
from typer.testing import CliRunner

from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.run_directory import RunDirectory

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

SWEEP = {
    "model": "replaced on the command line",
    "budgets": [48, 0.5],
    "max_new_tokens": 4,
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.2, 0.8], "num_examples": 4}],
    "policies": ["streaming_llm", {"name": "snapkv", "options": {"window": 8}, "grid": {"unit": ["head", "layer"]}}],
}


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    path = tmp_path / "sweep.yaml"
    path.write_text(yaml.safe_dump(SWEEP))
    return path


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    loaded = tiny_loaded()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


def test_run_then_resume_then_report(sweep: Path, model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    code, text = invoke("run", sweep, "--model", model_folder, "--out", out, "--limit", 2)
    assert code == 0, text
    rows = RunDirectory(out).rows()
    assert len(rows) == 2 * (1 + 4 * 2)  # full; random, streaming_llm, snapkv twice, at two budgets
    for row in rows:
        cell, cache, prompt = row.cell, row.cache, row.example["prompt_tokens"]
        expected = {None: prompt, 48: 48, 0.5: prompt // 2}[cell["budget"]]
        assert cache is not None
        assert cache.prompt_rows_mean == expected
        assert cache.measured_bytes >= cache.payload_bytes > 0
        assert cache.budget_binds is (cell["policy"] != "full")

    code, text = invoke("run", sweep, "--model", model_folder, "--out", out)
    assert "18 rows written, 18 done before, 0 failed" in text

    code, text = invoke("report", out)
    assert code == 0, text
    assert invoke("report", out, "--out", tmp_path / "made" / "here")[0] == 0
    assert (tmp_path / "made" / "here" / "report.html").is_file()
    assert "snapkv(unit=layer,window=8) @ 0.5" in (out / "report.md").read_text()


def test_parts_of_a_run_fill_one_folder(sweep: Path, model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for part in ("2/2", "1/2"):
        code, text = invoke("run", sweep, "--model", model_folder, "--out", out, "--part", part)
        assert code == 0, text
        assert "18 rows written, 0 done before" in text
    code, text = invoke("run", sweep, "--model", model_folder, "--out", out)
    assert "0 rows written, 36 done before" in text


@pytest.mark.parametrize("part", ["0/2", "3/2", "1", "x/y", "1/0"])
def test_a_part_that_is_none_is_refused(sweep: Path, part: str) -> None:
    code, text = invoke("run", sweep, "--part", part)
    assert code == 2
    assert "Write it as I/N" in " ".join(text.split())


def test_a_dry_run_counts_cells_and_tokens_and_loads_nothing(sweep: Path) -> None:
    code, text = invoke("run", sweep, "--dry-run", "--limit", 1)
    assert code == 0
    assert "9 cells, about 5400 tokens" in text


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policies.1.name=snapk", "Did you mean 'snapkv'"),
        ("policies.1.options.windw=3", "Did you mean 'window'"),
        ("policies.1.options.block_rows=16", "Give quantize too, or leave block_rows out."),
        ("policies.1.grid.block_rows=[16, 32]", "Give quantize too, or leave block_rows out."),
        ("tasks.0.length=3", "Did you mean"),
        ("budgets=[0]", "keeps nothing"),
        ("tasks.0.num_examples=5", "Ask for a multiple of 2"),
    ],
)
def test_mistakes_end_before_a_model_is_loaded(sweep: Path, override: str, message: str) -> None:
    code, text = invoke("run", sweep, "--set", override)
    assert code == 2
    assert message in " ".join(text.split())


def test_a_failed_cell_makes_the_exit_status_one(sweep: Path, model_folder: Path, tmp_path: Path) -> None:
    # How many rows bytes are is known where the cell runs.
    few_bytes = "budgets=[1KiB]"
    code, text = invoke(
        "run", sweep, "--model", model_folder, "--out", tmp_path / "out", "--set", few_bytes, "--limit", 1
    )
    assert code == 1
    assert "failed: BudgetError (The byte budget '1KiB' gives 4 rows to each of 4 pairs of a layer and a head" in text
    code, text = invoke("report", tmp_path / "out")
    assert code == 0
    assert "runtime-inadmissible" in (tmp_path / "out" / "report.md").read_text()


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_budget_of_too_few_rows_ends_before_the_first_cell(sweep: Path, tmp_path: Path, more: list[str]) -> None:
    # The default window of `random`, which is added, is 32; that of snapkv is 8 here.
    code, text = invoke("run", sweep, "--out", tmp_path / "out", "--set", "budgets=[32, 8]", *more)
    assert code == 2
    said = " ".join(text.split())
    assert "error: random @ 32 cannot run" in said
    assert "Give a budget of at least 33 rows" in said
    assert "The same holds for random @ 8, snapkv(unit=head,window=8) @ 8, snapkv(unit=layer,window=8) @ 8." in said
    assert "`include_random: false`" in said
    assert not (tmp_path / "out").exists()
    alone = ["--set", "include_random=false", "--set", "budgets=[9]"]
    assert invoke("run", sweep, "--dry-run", *alone)[0] == 0, "a window of 8 and a row to choose"


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_a_length_beyond_the_models_positions_ends_before_the_first_cell(
    sweep: Path, model_folder: Path, tmp_path: Path, more: list[str]
) -> None:
    lengths = "tasks.0.lengths_tokens=[600, 2049]"
    code, text = invoke("run", sweep, "--model", model_folder, "--out", tmp_path / "out", "--set", lengths, *more)
    assert code == 2
    assert "a length of 2049 tokens, and the model has positions for 2048" in " ".join(text.split())
    assert not (tmp_path / "out").exists()


def test_reporting_on_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    code, text = invoke("report", tmp_path)
    assert code == 2
    assert "run.json" in text


def test_a_missing_folder_is_named_before_a_missing_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "evaluate", None)
    code, text = invoke("report", tmp_path / "absent")
    assert code == 2
    assert "There is no folder" in text


def test_a_shipped_sweep_is_named_without_its_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    code, text = invoke("run", "smoke", "--dry-run")
    assert code == 0, text
    assert "33 cells" in text
    code, text = invoke("run", "smok", "--dry-run")
    assert code == 2
    assert "Did you mean 'smoke'" in " ".join(text.split())
    (tmp_path / "smoke").write_text(yaml.safe_dump(SWEEP))
    assert "9 cells" in invoke("run", "smoke", "--dry-run")[1], "a file of that name wins"


def test_a_model_that_cannot_be_loaded_is_one_line(sweep: Path) -> None:
    code, text = invoke("run", sweep, "--model", "nobody/no-such-model")
    assert code == 2
    assert "error: The model 'nobody/no-such-model' cannot be loaded" in " ".join(text.split())


def test_a_model_folder_that_is_not_there_is_named(sweep: Path, tmp_path: Path) -> None:
    for more in ([], ["--dry-run"]):
        code, text = invoke("run", sweep, "--model", tmp_path / "absent", *more)
        assert code == 2
        assert "cannot be loaded: there is no such folder" in " ".join(text.split())


def test_a_missing_package_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in sys.modules if name.startswith("hf_kvpolicy.eval.")]:
        if name.rpartition(".")[2] in {"report", "summary", "answer_nll", "needle_match", "terminal", "plots"}:
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "evaluate", None)
    code, text = invoke("report", tmp_path)
    assert code == 2
    assert "pip install 'hf-kvpolicy[eval]'" in " ".join(text.split())
