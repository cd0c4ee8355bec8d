"""The runner with a stand-in engine: rows, failures, policies that do nothing, and resuming."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("evaluate")

from eval_fakes import FakeCache, fake_builder, tiny_loaded

from hf_kvpolicy.errors import BackendAdmissionError, ConfigError
from hf_kvpolicy.eval import acting
from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.engine import EngineBuilder
from hf_kvpolicy.eval.environment import oversubscription_warning
from hf_kvpolicy.eval.model_loading import LoadedModel
from hf_kvpolicy.eval.outcomes import Outcome
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.report_tables import table_cells
from hf_kvpolicy.eval.run_directory import RunDirectory
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
    record = RunDirectory(tmp_path).read_run()
    assert record["identity"]["uses_chat_template"] is True
    assert record["tasks"]["needle_single_noise"]["haystack"] == "noise"
    (place,) = record["environments"].values()
    assert place["torch"] == torch.__version__
    assert {row.environment for row in RunDirectory(tmp_path).rows()} == set(record["environments"])
    assert (tmp_path / "examples" / "needle_single_noise-600-0.jsonl").is_file()


@dataclass
class IdleCache(FakeCache):
    """Acts on 64 rows but for the ways named in `idle`."""

    idle: tuple[str, ...] = ()

    def finish_prefill(self) -> None:
        # What is kept stays; what is claimed may differ.
        self.keep_rows = None if "rows" in self.idle else 64
        super().finish_prefill()
        self.statistics.selections = 0 if "selections" in self.idle else 1
        self.statistics.publications *= "publications" not in self.idle
        self.composition.representation.replaces_rows = "merging" in self.idle


@pytest.mark.parametrize(
    ("idle", "reason"),
    [
        (("publications",), "led to no publication"),
        (("selections",), "no selection at all"),
        (("rows",), "rows of the prompt are still stored"),
        (("rows", "selections"), "no selection at all"),
        (("rows", "selections", "publications"), "led to no publication"),
        # A policy that merges selects nothing and lets no row go: its bytes must be fewer.
        (("rows", "selections", "merging"), "where no row replaces others"),
    ],
)
def test_a_policy_that_did_not_act_fails_and_has_no_score(
    loaded: LoadedModel, tmp_path: Path, idle: tuple[str, ...], reason: str
) -> None:
    def build(cell: Cell) -> FakeCache:
        return IdleCache(idle=idle) if cell.policy == "snapkv" else fake_builder(cell)

    outcome, rows = run(loaded, tmp_path, build)
    (failed,) = rows_of(rows, "snapkv")
    assert failed.status == "failed: policy did not act"
    assert reason in str(failed.reason)
    assert failed.quality is None
    assert failed.cache is not None
    assert failed.outcome == "unmeasured"
    assert outcome.failed == 1
    assert {row.status for row in rows_of(rows, "random")} == {"ok"}


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "adakv", "fastgen"])
def test_a_policy_of_the_engine_that_selects_nothing_fails(loaded: LoadedModel, tmp_path: Path, policy: str) -> None:
    """The full cache under another policy's name, whether that has a budget or none."""
    build = EngineBuilder(loaded.model, loaded.tokenizer)

    def swapped(cell: Cell) -> Any:
        return build(replace(cell, policy="full", budget=None, options={}))

    budgets = [] if policy == "fastgen" else [64]
    _, rows = run(loaded, tmp_path, swapped, policies=[{"name": policy, "budgets": budgets}], include_random=False)
    (failed,) = rows_of(rows, policy)
    assert failed.status == "failed: policy did not act"
    assert {row.status for row in rows_of(rows, "full")} == {"ok"}


@pytest.mark.parametrize(
    ("policy", "options", "reason"),
    [
        ("snapkv", {"quantize": "int8"}, "where quantize='int8' was asked for"),
        ("adakv", {"quantize": "int4"}, "where quantize='int4' was asked for"),
        ("snapkv", {"unit": "pair", "merge_layers": {"start_layer": 0}}, "every layer stores its own rows"),
    ],
)
def test_rows_that_are_not_stored_as_asked_fail(
    loaded: LoadedModel, tmp_path: Path, policy: str, options: dict[str, Any], reason: str
) -> None:
    build = EngineBuilder(loaded.model, loaded.tokenizer)

    def forgetful(cell: Cell) -> Any:
        return build(replace(cell, options={}))

    policies = [{"name": policy, "options": options, "budgets": [64]}]
    _, rows = run(loaded, tmp_path, forgetful, policies=policies, include_random=False)
    assert reason in str(rows_of(rows, policy)[0].reason)
    _, rows = run(loaded, tmp_path / "as asked", build, policies=policies, include_random=False)
    assert {row.status for row in rows} == {"ok"}


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
    samples = next(tmp_path.glob("cells/*snapkv*/samples.0.jsonl"))
    samples.write_bytes(samples.read_bytes()[:-40])
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


def test_a_worker_writes_its_own_file_and_sees_what_others_did(loaded: LoadedModel, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _, expected = run(loaded, whole)
    for rank in (1, 0):
        directory = RunDirectory(parts, rank=rank)
        run_sweep(config(), loaded, directory, fake_builder, part=(rank + 1, 2), say=lambda line: None)
    rows = RunDirectory(parts).rows()
    assert [row.row_key for row in rows] == [row.row_key for row in expected]
    assert [row.quality for row in rows] == [row.quality for row in expected]
    assert {path.name for path in parts.glob("cells/*/samples.*")} == {"samples.0.jsonl", "samples.1.jsonl"}
    assert run(loaded, parts)[0] == RunOutcome(written=0, skipped=6, failed=0)


def test_a_good_row_of_one_worker_stands_before_a_failed_one_of_another(loaded: LoadedModel, tmp_path: Path) -> None:
    run(loaded, tmp_path)
    for samples in tmp_path.glob("cells/*/samples.0.jsonl"):
        line = json.loads(samples.read_text().splitlines()[0])
        failed = {**line, "status": "failed: x", "quality": None}
        (samples.parent / "samples.1.jsonl").write_text(json.dumps(failed) + "\n")
    assert {row.status for row in RunDirectory(tmp_path).rows()} == {"ok"}


def test_rows_of_another_environment_are_not_mixed_unless_asked(loaded: LoadedModel, tmp_path: Path) -> None:
    run(loaded, tmp_path, limit=1)
    (place,) = (tmp_path / "environments").iterdir()
    place.write_text(json.dumps({**json.loads(place.read_text()), "torch": "1.0"}))
    with pytest.raises(ConfigError, match=r"torch '1.0' ->.*--allow-mixed"):
        run(loaded, tmp_path)
    outcome = run_sweep(config(), loaded, RunDirectory(tmp_path), fake_builder, allow_mixed=True, say=lambda line: None)
    assert (outcome.written, outcome.skipped) == (3, 3)


def test_progress_is_a_line_an_example_and_one_a_cell(loaded: LoadedModel, tmp_path: Path) -> None:
    said: list[str] = []
    run_sweep(config(), loaded, RunDirectory(tmp_path), fake_builder, say=said.append)
    assert said.pop(0).startswith("warning: Canary")
    assert "answers take up to 8 tokens, and max_new_tokens is 4" in said.pop(0)
    assert [line.partition(", about")[0] for line in said[:2]] == [
        "needle_single_noise 600 tokens: example 1 of 2",
        "needle_single_noise 600 tokens: example 2 of 2",
    ]
    assert said[1].endswith("about 0 s left")
    assert {line.rpartition(":")[0] for line in said[2:]} == {
        "needle_single_noise 600 tokens, full",
        "needle_single_noise 600 tokens, snapkv @ 64",
        "needle_single_noise 600 tokens, random @ 64",
    }


def test_the_floor_asks_without_the_text(loaded: LoadedModel, tmp_path: Path) -> None:
    _, rows = run(loaded, tmp_path, floor=True)
    full, floor = rows_of(rows, "full"), rows_of(rows, "no_context")
    assert [row.example["id"] for row in floor] == [row.example["id"] for row in full]
    for row, other in zip(floor, full, strict=True):
        assert row.status == "ok"
        assert row.example["prompt_tokens"] < 150 < other.example["prompt_tokens"]
        assert row.quality is not None
        assert row.quality.kl_to_full_nats is not None
        assert row.quality.kl_to_full_nats > 0
    summaries = {summary.cell.policy: summary for summary in summarise(rows)}
    assert {summary.floor_score for summary in summaries.values()} == {0.0}
    assert "no_context" not in {row.cell["policy"] for row in run(loaded, tmp_path / "other")[1]}
