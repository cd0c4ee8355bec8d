"""LongBench through the runner, and its command: what is run, what is written, and how mistakes end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eval_fakes import fake_builder, made_row, tiny_loaded
from longbench_fakes import write_data
from typer.testing import CliRunner

from hf_kvpolicy.eval import trial
from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.records import QualityRecord, Row
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import RunOutcome, run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep
from hf_kvpolicy.eval.tasks.base import Example

pytest.importorskip("evaluate")
pytest.importorskip("jieba")
pytest.importorskip("rouge")
pytest.importorskip("rapidfuzz")

from hf_kvpolicy.eval.longbench import app, published_scores


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("longbench"), count=3)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, loaded = tmp_path_factory.mktemp("model"), tiny_loaded()
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    return folder


def invoke(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, " ".join(result.output.split())


def test_rows_say_what_was_cut_and_how_it_was_measured(data: Path, tmp_path: Path) -> None:
    names = ("longbench_e_qasper", "longbench_samsum")
    params = {"data": str(data)}
    config = parse_sweep(
        {
            "model": "tiny",
            "budgets": [64],
            "max_new_tokens": 3,
            "tasks": [{"name": n, "lengths_tokens": [700], "num_examples": 9, "params": params} for n in names],
            "policies": ["snapkv"],
            "query_aware": [True, False],
        }
    )
    directory = RunDirectory(tmp_path)
    outcome = run_sweep(config, tiny_loaded(), directory, fake_builder, say=lambda line: None)
    # Two tasks, both ways of asking, three policies (full and random are added), all of three records.
    assert outcome == RunOutcome(written=2 * 2 * 3 * 3)
    for row in directory.rows():
        assert row.quality is not None
        assert row.example["truncated"] is True
        assert row.example["dropped_tokens"] > 0
        extended = row.cell["task"] == "longbench_e_qasper"
        assert row.example["metric"] == ("qa_f1" if extended else "rouge_l_first_line")
        assert ("length_bucket" in row.example) is extended
        assert row.example["record_id"]
        # The chat template of the one comes on top of the length.
        assert (row.example["prompt_tokens"] > 700) is extended
    provenance = directory.read_run()["tasks"]["longbench_samsum"]
    assert provenance["data"] == "samsum.jsonl"
    assert len(provenance["data_sha256"]) == 64


def test_a_stop_string_of_one_token_is_passed_over_at_the_beginning() -> None:
    tokenizer = tiny_loaded().tokenizer
    (newline,) = tokenizer("\n", add_special_tokens=False)["input_ids"]
    example = Example(context="", question="", answer_prefix="", answers=("a",), stop=("\n", "ab"))
    assert trial._stop_token_ids(tokenizer, example) == {newline}


def test_the_command_runs_resumes_and_writes_published_scores(data: Path, model_folder: Path, tmp_path: Path) -> None:
    arguments = ("--model", model_folder, "--data", data, "--budget", 64, "--length", 600, "--out", tmp_path / "out")
    few = ("--tasks", "qasper", "hotpotqa", "--set", "max_new_tokens=2", "--examples", 2, "--no-random")
    code, text = invoke(*arguments, *few)
    assert code == 0, text
    assert "8 rows written, 0 done before" in text  # two tasks, two records, full and snapkv
    scores = json.loads((tmp_path / "out" / "longbench.json").read_text())
    assert list(scores) == ["full, 600 tokens", "snapkv @ 64, 600 tokens"]
    assert all(list(by_task) == ["longbench_qasper", "longbench_hotpotqa"] for by_task in scores.values())
    code, text = invoke(*arguments, *few)
    assert "0 rows written, 8 done before" in text

    code, text = invoke(*arguments, *few, "--e", "--query-agnostic")
    assert code == 0, text
    scores = json.loads((tmp_path / "out" / "longbench.json").read_text())
    assert set(scores["full, 600 tokens, question unseen"]["longbench_e_qasper"]) <= {"0-4k", "4-8k", "8k+"}


def test_a_folder_is_not_continued_with_other_measures_or_records(
    data: Path, model_folder: Path, tmp_path: Path
) -> None:
    small = ("--set", "max_new_tokens=2", "--examples", 1, "--length", 600, "--policy", "full", "--no-random")
    arguments = ("--model", model_folder, "--data", data, *small, "--out", tmp_path / "out")
    assert invoke(*arguments, "--tasks", "lcc")[0] == 0
    # Another task in between is one more task of the folder.
    assert invoke(*arguments, "--tasks", "qasper")[0] == 0
    code, text = invoke(*arguments, "--tasks", "lcc", "--no-compat")
    assert code == 2
    assert "rows of task 'longbench_lcc' with another compat" in text
    other = write_data(tmp_path / "other", count=1)
    code, text = invoke(*arguments, "--tasks", "lcc", "--data", other)
    assert code == 2
    assert "with another data_sha256" in text


def test_scores_are_kept_where_a_row_failed(data: Path, model_folder: Path, tmp_path: Path) -> None:
    code, text = invoke(
        "--model", model_folder, "--data", data, "--tasks", "qasper", "--examples", 1, "--length", 600, "--budget", 64,
        "--set", "max_new_tokens=2", "--set", "policies.0.budgets=[1KiB]", "--out", tmp_path,
    )  # fmt: skip
    assert code == 1, text
    scores = json.loads((tmp_path / "longbench.json").read_text())
    assert list(scores) == ["full, 600 tokens", "random @ 64, 600 tokens"]


def test_without_tasks_all_of_the_benchmark_is_run(data: Path) -> None:
    code, text = invoke("--model", "none", "--data", data, "--dry-run")
    assert code == 0, text
    assert "63 cells" in text  # 21 tasks; full, snapkv and random
    code, text = invoke("--model", "none", "--data", data, "--dry-run", "--e", "--policy", "h2o", "--policy", "adakv")
    assert "52 cells" in text  # 13 tasks; full, two policies and random


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--tasks", "qaspr"), "Did you mean 'qasper'"),
        (("--e", "--tasks", "musique"), "LongBench-E has no task 'musique'"),
        (("--policy", "snapk"), "Did you mean 'snapkv'"),
        (("--budget", "0"), "keeps nothing"),
        (("--set", "max_new_tokens"), "has no '='"),
        (("--data", "absent"), "There is no folder or archive 'absent'"),
        (("--prompts", "absent"), "There is no dataset2prompt.json in 'absent'"),
    ],
)
def test_mistakes_end_before_a_model_is_loaded(data: Path, arguments: tuple[str, ...], message: str) -> None:
    code, text = invoke("--model", "none", "--data", data, *arguments)
    assert code == 2
    assert message in text


def row(task: str, index: int, score: float, bucket: str | None = None, **changes: object) -> Row:
    cell = Cell(task=task, length_tokens=3500, policy="snapkv", budget=64)
    quality = QualityRecord(
        score=score, answer_nll=1.0, answer_top1_rate=0.0, answer_tokens=1, output_text="", output_tokens=1,
        finish_reason="eos",
    )  # fmt: skip
    example = {"id": f"{task}{index}", **({"length_bucket": bucket} if bucket else {})}
    return made_row("snapkv", index, cell=cell.coordinates(), example=example, quality=quality, **changes)


def test_published_scores_are_percent_with_two_decimals_and_buckets_of_what_is_there() -> None:
    rows = [row("longbench_qasper", index, score) for index, score in enumerate([1.0, 0.0, 0.0])]
    rows += [row("longbench_e_trec", 0, 1.0, "8k+"), row("longbench_e_trec", 1, 0.5, "0-4k")]
    rows += [row("longbench_lcc", 0, 1.0), row("longbench_lcc", 1, 1.0, status="failed: X")]
    rows[-1] = Row(**{name: getattr(rows[-1], name) for name in rows[-1].__slots__} | {"quality": None})
    # An empty bucket is left out, where the published code has "not a number".
    assert published_scores(rows) == {
        "snapkv @ 64, 3500 tokens": {"longbench_qasper": 33.33, "longbench_e_trec": {"0-4k": 50.0, "8k+": 100.0}}
    }
