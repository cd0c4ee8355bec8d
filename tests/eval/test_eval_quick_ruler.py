"""The commands for RULER, the heat map and perplexity, and the list of tasks: options become sweeps that run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from eval_fakes import fake_builder, tiny_loaded
from typer.testing import CliRunner

pytest.importorskip("evaluate")

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval import cli, niah, perplexity, ruler
from hf_kvpolicy.eval.list_options import one_value_each
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import run_sweep
from hf_kvpolicy.eval.summary import summarise
from hf_kvpolicy.eval.sweep import parse_sweep
from hf_kvpolicy.eval.tasks.registry import available_tasks


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    loaded = tiny_loaded()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def invoke(app: Any, *arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


PERPLEXITY = {"name": "perplexity_pydoc", "lengths_tokens": [900], "num_examples": 2}
PARAMS = {"params": {"continuation_tokens": 200}}


def run(folder: Path, task: dict[str, Any]) -> list[Row]:
    document = {"model": "tiny", "tasks": [task], "policies": ["snapkv"], "budgets": [64], "max_new_tokens": 4}
    directory = RunDirectory(folder)
    run_sweep(parse_sweep(document), tiny_loaded(), directory, fake_builder, say=lambda line: None)
    return directory.rows()


def test_nothing_is_generated_and_the_cache_is_fed_the_continuation(tmp_path: Path) -> None:
    rows = run(tmp_path, PERPLEXITY | PARAMS)
    assert len(rows) == 2 * 3
    for row in rows:
        assert row.status == "ok", row.reason
        assert row.quality is not None
        assert row.cache is not None
        assert row.timing is not None
        assert (row.quality.output_text, row.quality.output_tokens, row.quality.finish_reason) == ("", 0, "none")
        assert row.quality.score == pytest.approx(math.exp(-row.quality.answer_nll))
        prompt, continuation = row.example["prompt_tokens"], row.quality.answer_tokens
        assert prompt + continuation <= 900
        kept = prompt if row.cell["policy"] == "full" else 64
        # One forward for the prompt and one for every token but the last, all into the cache that is measured.
        assert row.cache.forwards == continuation
        assert row.cache.prompt_rows_mean == kept
        assert row.cache.final_rows_mean == kept + continuation - 1
        assert row.timing.decode_ms_per_token > 0


def test_a_likelihood_is_interpretable_without_a_canary(tmp_path: Path) -> None:
    found = summarise(run(tmp_path, PERPLEXITY | PARAMS))
    assert all(summary.interpretable and summary.measured is not None for summary in found)
    assert all(summary.measured.score.mean < 0.5 for summary in found if summary.measured is not None)


def test_a_task_that_generates_nothing_takes_no_tokens_to_generate() -> None:
    document = {"model": "tiny", "policies": ["snapkv"], "budgets": [64], "max_new_tokens": 4}
    (task,) = parse_sweep({**document, "tasks": [PERPLEXITY]}).tasks
    assert task.max_new_tokens == 0
    with pytest.raises(ConfigError, match="generates nothing"):
        parse_sweep({**document, "tasks": [PERPLEXITY | {"max_new_tokens": 3}]})
    needle = {"name": "needle_single_noise", "lengths_tokens": [900], "max_new_tokens": 0}
    with pytest.raises(ConfigError, match="at least 1"):
        parse_sweep({**document, "tasks": [needle]})


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("--lengths 1 2 3", "--lengths 1 --lengths 2 --lengths 3"),
        ("--lengths 1 --depths 0 0.5 --dry-run", "--lengths 1 --depths 0 --depths 0.5 --dry-run"),
        ("--lengths=1 2", "--lengths=1 --lengths 2"),
        ("", ""),
    ],
)
def test_an_option_takes_several_values(given: str, expected: str) -> None:
    assert one_value_each(given.split()) == expected.split()


def test_the_heat_map_runs_and_prints_a_map_a_policy(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--model", model_folder, "--policy", "snapkv", "--budget", 64, "--no-random", "--out", out)
    grid = ("--lengths", 900, 1200, "--depths", 0, 1, "--set", "max_new_tokens=2")
    code, text = invoke(niah.app, *options, *grid)
    assert code == 0, text
    rows = RunDirectory(out).rows()
    # Full cache and snapkv, two lengths, two depths, three needles.
    assert len(rows) == 2 * 2 * 2 * 3
    cells = {(row.cell["length_tokens"], row.example["depth_ratio"], row.example["needle"]) for row in rows}
    assert len(cells) == 12
    assert "full depth 900 1200 0.00 0.00 0.00 1.00 0.00 0.00" in text
    assert "snapkv @ 64 depth 900 1200" in text


def test_a_heat_map_of_one_needle_a_cell_is_refused(tmp_path: Path) -> None:
    document = {"model": "tiny", "policies": ["snapkv"], "budgets": [64]}
    task = {"name": "niah_pydoc", "lengths_tokens": [900], "depths": [0.5], "num_examples": 1}
    with pytest.raises(ConfigError, match="takes 3 examples"):
        run_sweep(
            parse_sweep({**document, "tasks": [task]}), tiny_loaded(), RunDirectory(tmp_path), fake_builder, say=str
        )


def test_perplexities_are_printed(model_folder: Path, tmp_path: Path) -> None:
    options = ("--model", model_folder, "--policy", "streaming_llm", "--budget", 64, "--out", tmp_path / "out")
    code, text = invoke(perplexity.app, *options, "--lengths", 700, "--continuation", 60, "--examples", 1)
    assert code == 0, text
    for label in ("full", "random @ 64", "streaming_llm @ 64"):
        assert f"perplexity_pydoc 700 tokens, {label}: perplexity " in text


def test_ruler_runs_tasks_under_its_own_names(model_folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--model", model_folder, "--budget", 64, "--no-random", "--examples", 5, "--out", out)
    grid = ("--tasks", "niah_single_2", "fwe", "--length", 1500, "--set", "max_new_tokens=2")
    code, text = invoke(ruler.app, *options, *grid)
    assert code == 0, text
    assert {row.cell["task"] for row in RunDirectory(out).rows()} == {"ruler_niah_single_2_pydoc", "ruler_fwe"}
    assert "1500 tokens, full: 0.00 over 2 tasks" in text


def test_ruler_lists_all_tasks_that_need_no_data() -> None:
    code, text = invoke(ruler.app, "--model", "tiny", "--dry-run", "--no-random")
    assert code == 0, text
    assert "22 cells" in text
    code, text = invoke(ruler.app, "--model", "tiny", "--dry-run", "--tasks", "niah_singel_2")
    assert code == 2
    assert "Did you mean 'ruler_niah_single_2" in text


def test_the_list_of_tasks_has_every_name_and_parameter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, text = invoke(cli.app, "tasks")
    assert code == 0, text
    assert all(name in text for name in available_tasks())
    assert "continuation_tokens" in text
    assert "RULER" in text
