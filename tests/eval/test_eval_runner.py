"""The runner with a stand-in engine: rows, failures, policies that do nothing, and resuming."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("evaluate")

from eval_fakes import FakeCache, fake_builder, tiny_loaded

from hf_kvpolicy.errors import BackendAdmissionError, ConfigError
from hf_kvpolicy.eval import acting
from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.environment import oversubscription_warning
from hf_kvpolicy.eval.model_loading import LoadedModel
from hf_kvpolicy.eval.outcomes import Outcome
from hf_kvpolicy.eval.records import Row, RunDirectory
from hf_kvpolicy.eval.report import table_cells
from hf_kvpolicy.eval.runner import RunOutcome, run_sweep
from hf_kvpolicy.eval.summary import summarise
from hf_kvpolicy.eval.sweep import SweepConfig, parse_sweep


def config(**changes: Any) -> SweepConfig:
    document = {
        "model": "tiny",
        "budgets": [64],
        "max_new_tokens": 4,
        "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.2, 0.8], "num_examples": 2}],
        "policies": ["snapkv"],
    }
    return parse_sweep({**document, **changes})


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


def run(loaded: LoadedModel, folder: Path, build: Any = fake_builder, **changes: Any) -> tuple[RunOutcome, list[Row]]:
    directory = RunDirectory(folder)
    limit = changes.pop("limit", None)
    outcome = run_sweep(config(**changes), loaded, directory, build, limit=limit, say=lambda line: None)
    return outcome, directory.rows()


def rows_of(rows: list[Row], policy: str) -> list[Row]:
    return [row for row in rows if row.cell["policy"] == policy]


def test_every_row_has_score_nll_rows_and_bytes(loaded: LoadedModel, tmp_path: Path) -> None:
    outcome, rows = run(loaded, tmp_path)
    assert outcome == RunOutcome(written=6, skipped=0, failed=0)
    for row in rows:
        assert row.status == "ok"
        assert row.quality is not None
        assert row.cache is not None
        assert row.timing is not None
        prompt = row.example["prompt_tokens"]
        stored = prompt if row.cell["policy"] == "full" else 64
        assert row.cache.prompt_rows_mean == row.cache.prompt_rows_max == stored
        assert row.cache.kept_ratio == pytest.approx(stored / prompt)
        # 2 layers, 2 KV heads, keys and values of 8 floats.
        assert row.cache.full_kv_bytes == 2 * 2 * 2 * 8 * 4 * prompt
        assert row.cache.measured_bytes == 2 * 2 * 2 * 8 * 4 * stored
        assert row.quality.answer_nll > 0
        assert row.example["truncated"] is False
    full, snapkv = rows_of(rows, "full"), rows_of(rows, "snapkv")
    assert [r.example["prompt_sha256"] for r in full] == [r.example["prompt_sha256"] for r in snapkv]


def test_the_run_record_names_model_texts_and_versions(loaded: LoadedModel, tmp_path: Path) -> None:
    run(loaded, tmp_path)
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["identity"]["uses_chat_template"] is True
    assert record["tasks"]["needle_single_noise"]["haystack"] == "noise"
    assert record["versions"]["torch"] == torch.__version__
    assert (tmp_path / "examples" / "needle_single_noise-600-0.jsonl").is_file()


def test_a_policy_that_keeps_everything_fails_and_has_no_score(loaded: LoadedModel, tmp_path: Path) -> None:
    def build(cell: Cell) -> FakeCache:
        return FakeCache(keep_rows=None if cell.policy == "snapkv" else 64)

    outcome, rows = run(loaded, tmp_path, build)
    (failed,) = rows_of(rows, "snapkv")
    assert failed.status == "failed: policy did not act"
    assert failed.quality is None
    assert failed.cache is not None
    assert failed.outcome == "unmeasured"
    assert "no selection" in str(failed.reason)
    assert outcome.failed == 1


def test_a_policy_that_keeps_more_than_its_budget_fails(loaded: LoadedModel, tmp_path: Path) -> None:
    _, rows = run(loaded, tmp_path, lambda cell: FakeCache(keep_rows=80))
    assert "80.0 rows a head are stored where the budget allows 64" in str(rows_of(rows, "snapkv")[0].reason)


def test_a_policy_that_grows_past_its_budget_while_decoding_fails(loaded: LoadedModel, tmp_path: Path) -> None:
    _, rows = run(loaded, tmp_path, lambda cell: FakeCache(keep_rows=64, declares_tail=False))
    assert "67.0 rows a head are stored after decoding" in str(rows_of(rows, "snapkv")[0].reason)


def test_a_budget_that_takes_nothing_is_not_run_and_has_not_failed(loaded: LoadedModel, tmp_path: Path) -> None:
    outcome, rows = run(loaded, tmp_path, budgets=[5000])
    assert outcome.failed == 0
    assert {row.status for row in rows_of(rows, "full")} == {"ok"}
    equal = rows_of(rows, "snapkv")
    assert {(row.status, row.outcome, row.quality, row.cache) for row in equal} == {
        ("equals-full", "equals-full", None, None)
    }
    summaries = {summary.cell.policy: summary for summary in summarise(rows)}
    assert summaries["snapkv"].outcome is Outcome.EQUALS_FULL
    assert not summaries["snapkv"].has_failed
    assert table_cells(summaries["snapkv"])[-1] == "equals-full"
    again, _ = run(loaded, tmp_path, lambda cell: pytest.fail("a cache was built"), budgets=[5000])
    assert again.written == 0


@pytest.mark.parametrize(("budget", "equal"), [(600, True), (599, False), (1.0, True), (0.99, False)])
def test_a_cell_is_run_when_its_budget_binds_on_one_prompt(budget: int | float, equal: bool) -> None:
    cache, model = FakeCache(), tiny_loaded().model
    cell = Cell(task="needle", length_tokens=600, policy="snapkv", budget=budget)
    assert acting.equals_full(cell, cache, model, [100, 600]) is equal


def test_byte_budgets_are_resolved_before_a_cache_holds_anything() -> None:
    """Two layers, two KV heads, head dimension 8, fp32: a row of all owners takes 2 * 2 * 64 bytes."""
    cache, model = FakeCache(), tiny_loaded().model
    cells = [Cell(task="needle", length_tokens=9, policy="snapkv", budget=f"{256 * rows}B") for rows in (60, 59)]
    assert [acting.equals_full(cell, cache, model, [60]) for cell in cells] == [True, False]


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (BackendAdmissionError("no"), "failed: BackendAdmissionError", "backend-incompatible"),
        (torch.OutOfMemoryError("full"), "failed: out of memory", "runtime-inadmissible"),
        (ZeroDivisionError("bug"), "failed: ZeroDivisionError", "unmeasured"),
    ],
)
def test_an_error_fails_its_cell_and_the_sweep_goes_on(
    loaded: LoadedModel, tmp_path: Path, error: Exception, status: str, outcome: str
) -> None:
    def build(cell: Cell) -> FakeCache:
        if cell.policy == "random":
            raise error
        return fake_builder(cell)

    found, rows = run(loaded, tmp_path, build)
    (failed,) = rows_of(rows, "random")
    assert (failed.status, failed.outcome, failed.quality) == (status, outcome, None)
    assert len(rows_of(rows, "snapkv")) == 2
    assert found.failed == 1


def test_a_prompt_beyond_the_models_positions_is_refused(tmp_path: Path) -> None:
    _, rows = run(tiny_loaded(max_position_embeddings=128), tmp_path)
    assert "Ask for a shorter length" in str(rows[0].reason)


def test_a_second_run_computes_nothing(loaded: LoadedModel, tmp_path: Path) -> None:
    _, first = run(loaded, tmp_path)
    outcome, second = run(loaded, tmp_path, lambda cell: pytest.fail("a cache was built"))
    assert outcome == RunOutcome(written=0, skipped=6, failed=0)
    assert second == first


def test_a_torn_line_is_dropped_and_its_row_computed_again(loaded: LoadedModel, tmp_path: Path) -> None:
    _, first = run(loaded, tmp_path)
    lines = (tmp_path / "rows.jsonl").read_bytes()
    (tmp_path / "rows.jsonl").write_bytes(lines[:-40])
    assert len(RunDirectory(tmp_path).rows()) == 5
    outcome, second = run(loaded, tmp_path)
    assert outcome == RunOutcome(written=1, skipped=5, failed=0)
    assert {row.row_key for row in second} == {row.row_key for row in first}


def test_failed_rows_are_tried_again_and_replaced(loaded: LoadedModel, tmp_path: Path) -> None:
    run(loaded, tmp_path, lambda cell: FakeCache(keep_rows=80))
    _, rows = run(loaded, tmp_path)
    assert {row.status for row in rows} == {"ok"}
    assert len(rows) == 6


def test_more_examples_continue_a_limited_run(loaded: LoadedModel, tmp_path: Path) -> None:
    first, _ = run(loaded, tmp_path, limit=1)
    second, _ = run(loaded, tmp_path)
    assert (first.written, second.skipped, second.written) == (3, 3, 3)


def test_a_folder_of_another_model_is_refused(loaded: LoadedModel, tmp_path: Path) -> None:
    run(loaded, tmp_path)
    with pytest.raises(ConfigError, match="another model"):
        run(tiny_loaded(chat=False), tmp_path)


def test_more_threads_than_cores_are_warned_about() -> None:
    assert oversubscription_warning(1, 1) is None
    assert "Runs will be several times slower" in str(oversubscription_warning(64, 64))
