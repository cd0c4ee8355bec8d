"""Baselines at the rows that another cell held: what is asked for, what runs, and that no interrupt changes either."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

from eval_fakes import fake_builder, made_row, tiny_loaded
from helpers import declared, small_options
from typer.testing import CliRunner

from hf_kvpolicy import available_policies, make_cache
from hf_kvpolicy.config import with_tokenizer
from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval import generation
from hf_kvpolicy.eval.cells import Cell, cells_at, same_rows, task_points
from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.engine import EngineBuilder, RowsOverTime, measure
from hf_kvpolicy.eval.matching import finished
from hf_kvpolicy.eval.model_loading import LoadedModel
from hf_kvpolicy.eval.pairing import pairs
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.report import write_report
from hf_kvpolicy.eval.results import results_of
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import RunOutcome, run_sweep
from hf_kvpolicy.eval.sweep import parse_sweep

BASELINES = ["random", "sliding_window"]
DOCUMENT: dict[str, Any] = {
    "model": "tiny",
    "budgets": [80],
    "max_new_tokens": 6,
    "include_random": False,
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.2, 0.8], "num_examples": 4}],
    "policies": [
        {"name": "scissorhands", "matched": BASELINES},
        {"name": "fastgen", "budgets": [], "grid": {"recovery": [0.5, 0.7]}, "matched": BASELINES},
    ],
}
CELLS = 1 + 3 * (1 + len(BASELINES))


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_loaded()


@pytest.fixture(scope="module")
def whole(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    assert run(loaded, folder) == RunOutcome(written=4 * CELLS)
    return folder


def run(loaded: LoadedModel, folder: Path, build: Any = None, *, rank: int = 0, **how: Any) -> RunOutcome:
    changes = {key: how.pop(key) for key in list(how) if key in DOCUMENT}
    build = build or EngineBuilder(loaded.model, loaded.tokenizer)
    config = parse_sweep({**DOCUMENT, **changes})
    return run_sweep(config, loaded, RunDirectory(folder, rank=rank), build, say=lambda line: None, **how)


def stable(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in asdict(row).items() if k != "timing"} for row in RunDirectory(folder).rows()]


def matched_rows(folder: Path) -> list[tuple[Row, Row]]:
    """Every row of a matched cell, with its source's row of the same example."""
    rows = RunDirectory(folder).rows()
    found = {(Cell(**row.cell).label, row.example["id"]): row for row in rows}
    matched = [row for row in rows if "matched_to" in row.cell]
    return [(row, found[Cell(**row.cell).source.label, row.example["id"]]) for row in matched]


def test_matched_cells_follow_their_source_and_are_named_by_what_is_asked_for() -> None:
    config = parse_sweep(DOCUMENT)
    found = list(cells_at(config, next(task_points(config))))
    assert [cell.label for cell in found] == [
        "full",
        "scissorhands @ 80",
        "random @ rows of scissorhands @ 80",
        "sliding_window @ rows of scissorhands @ 80",
        "fastgen(recovery=0.5)",
        "random @ rows of fastgen(recovery=0.5)",
        "sliding_window @ rows of fastgen(recovery=0.5)",
        "fastgen(recovery=0.7)",
        "random @ rows of fastgen(recovery=0.7)",
        "sliding_window @ rows of fastgen(recovery=0.7)",
    ]
    assert len({cell.key("identity") for cell in found}) == CELLS
    for cell in found:
        assert ("matched_to" in cell.coordinates()) is (cell.matched_to is not None)
        assert Cell(**json.loads(json.dumps(cell.coordinates()))) == cell
    assert found[2].source == found[1].source == found[1]
    assert same_rows(found[1], found[2])
    assert same_rows(found[2], found[3])
    assert not same_rows(found[2], found[5])
    assert not same_rows(found[4], found[8])


def test_the_budget_is_what_the_source_held_of_the_same_example(whole: Path) -> None:
    found = matched_rows(whole)
    assert len(found) == 4 * 3 * len(BASELINES)
    for row, source in found:
        assert row.status == "ok"
        assert row.cache is not None
        assert source.cache is not None
        assert source.cache.rows_over_time_mean is not None
        assert row.cell["budget"] is None
        assert row.cache.budget_rows == round(source.cache.rows_over_time_mean)
        assert row.cache.prompt_rows_mean == row.cache.budget_rows
    assert len({row.cache.budget_rows for row, _ in found if row.cache}) > len(found) / 6, "prompts differ in rows"


@pytest.mark.parametrize("keep_lines", [0, 1, 3])
def test_a_run_that_was_killed_anywhere_is_continued_to_the_same_rows(
    loaded: LoadedModel, whole: Path, tmp_path: Path, keep_lines: int
) -> None:
    """A source that is done is not run again; what is matched to it reads its row."""
    run(loaded, tmp_path)
    for samples in tmp_path.glob("cells/*/samples.0.jsonl"):
        lines = samples.read_text().splitlines(keepends=True)
        if "rows_of" in samples.parent.name or keep_lines == 0:
            samples.write_text("".join(lines[:keep_lines]) + lines[keep_lines][:20])
    run(loaded, tmp_path)
    assert stable(tmp_path) == stable(whole)


def test_parts_and_a_limit_give_the_same_rows(loaded: LoadedModel, whole: Path, tmp_path: Path) -> None:
    run(loaded, tmp_path, limit=1)
    for rank in (1, 0):
        run(loaded, tmp_path, rank=rank, part=(rank + 1, 2))
    assert stable(tmp_path) == stable(whole)


def test_nothing_is_matched_to_a_source_that_failed_until_it_is_repaired(loaded: LoadedModel, tmp_path: Path) -> None:
    build = EngineBuilder(loaded.model, loaded.tokenizer)

    def broken(cell: Cell) -> Any:
        if cell.policy == "scissorhands":
            raise RuntimeError("broken")
        return build(cell)

    outcome = run(loaded, tmp_path, broken, limit=2)
    assert (outcome.written, outcome.failed) == (2 * (CELLS - 3) + 3, 3)
    failed = [row for row in RunDirectory(tmp_path).rows() if row.status != "ok"]
    assert [row.status for row in failed] == ["failed: RuntimeError", *["failed: NothingToMatchError"] * 2]
    assert {row.outcome for row in failed} == {"unmeasured"}
    assert "scissorhands @ 80 has no result for this example" in str(failed[1].reason)
    assert run(loaded, tmp_path, limit=2).failed == 0
    assert {row.status for row in RunDirectory(tmp_path).rows()} == {"ok"}


def test_a_source_whose_budget_takes_nothing_leaves_nothing_to_match(loaded: LoadedModel, tmp_path: Path) -> None:
    policies = [{"name": "scissorhands", "budgets": [5000], "matched": BASELINES}]
    assert run(loaded, tmp_path, policies=policies).failed == 0
    statuses = {row.cell["policy"]: row.status for row in RunDirectory(tmp_path).rows()}
    assert statuses == {"full": "ok", **dict.fromkeys(("scissorhands", *BASELINES), "equals-full")}


def test_a_record_without_rows_over_time_is_not_guessed_from(loaded: LoadedModel, tmp_path: Path) -> None:
    policies = [{"name": "snapkv", "matched": ["random"]}]
    run(loaded, tmp_path, fake_builder, policies=policies, limit=1)
    for samples in tmp_path.glob("cells/*/samples.0.jsonl"):
        row = json.loads(samples.read_text())
        del row["cache"]["rows_over_time_mean"]
        samples.write_text("" if "rows_of" in samples.parent.name else json.dumps(row) + "\n")
    assert run(loaded, tmp_path, fake_builder, policies=policies, limit=1).failed == 1
    assert "before rows over time were measured" in str(RunDirectory(tmp_path).rows()[-1].reason)


def test_reports_pair_a_source_with_what_is_matched_to_it(whole: Path, tmp_path: Path) -> None:
    write_report(RunDirectory(whole), tmp_path)
    text = (tmp_path / "report.md").read_text()
    cells = [line.split(" | ")[0] for line in text.splitlines() if " @ rows of scissorhands @ 80 |" in line]
    assert cells[:2] == ["| random @ rows of scissorhands @ 80", "| sliding_window @ rows of scissorhands @ 80"]
    assert "rows over time" in text
    assert "example by example, the rows that cell held over time" in text
    results = results_of(RunDirectory(whole))
    found = {(pair.summary.cell.label, pair.baseline) for pair in pairs(result.summary for result in results)}
    for source in ("scissorhands @ 80", "fastgen(recovery=0.5)", "fastgen(recovery=0.7)"):
        assert {(source, "random"), (source, "sliding_window"), (f"random @ rows of {source}", "full")} <= found
        assert (f"random @ rows of {source}", "sliding_window") in found
    by_label = {result.label: result.coordinates for result in results}
    coordinates = by_label["random @ rows of fastgen(recovery=0.7)"]
    assert coordinates["budget"] == "the rows of fastgen(recovery=0.7)"
    assert (coordinates["budget_unit"], coordinates["manifest_sha256"]) == ("rows", "differs within the cell")


def test_a_matched_baseline_is_taken_before_one_of_the_same_budget(loaded: LoadedModel, tmp_path: Path) -> None:
    policies = ["random", {"name": "snapkv", "matched": ["random"]}]
    run(loaded, tmp_path, fake_builder, policies=policies, limit=2)
    summaries = [result.summary for result in results_of(RunDirectory(tmp_path))]
    (pair,) = [pair for pair in pairs(summaries) if pair.summary.cell.policy == "snapkv" and pair.baseline == "random"]
    assert pair.n == 2
    lines = write_report(RunDirectory(tmp_path), tmp_path)
    assert [summary.cell.label for summary in lines] == [
        "full", "random @ 80", "snapkv @ 80", "random @ rows of snapkv @ 80",
    ]  # fmt: skip


@pytest.mark.parametrize("policy", available_policies())
def test_rows_over_time_are_those_that_a_count_after_every_token_finds(loaded: LoadedModel, policy: str) -> None:
    options = small_options(policy)
    budget = options.pop("budget", None)
    model = declared(copy.deepcopy(loaded.model), policy)
    cache = make_cache(policy, model, budget, **with_tokenizer(policy, options, loaded.tokenizer))
    ids = torch.randint(3, 200, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    prefilled = generation.prefill(model, [ids[:40]], cache)
    held, counted = RowsOverTime(cache, measure(cache)), [measure(cache).rows_mean]
    for token in ids[40:]:
        generation.prefill(model, [[token]], cache)
        held.token_fed()
        counted.append(measure(cache).rows_mean)
    assert prefilled.cache is cache
    assert held.last == pytest.approx(counted[-1])
    assert held.mean == pytest.approx(sum(counted) / len(counted))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"name": "snapkv", "matched": "random"}, "must be a list of policies"),
        ({"name": "snapkv", "matched": [1]}, "must be a list of policies"),
        ({"name": "snapkv", "matched": ["snapkv"]}, "'snapkv' at the rows of 'snapkv'"),
        ({"name": "snapkv", "matched": ["full"]}, "'full' at the rows of 'snapkv'"),
        ({"name": "full", "matched": ["random"]}, "'random' at the rows of 'full'"),
    ],
)
def test_what_cannot_be_matched_is_refused(policy: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_sweep({**DOCUMENT, "policies": [policy]})


def test_a_dry_run_lists_them_as_pending_and_refuses_an_unknown_name(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep.yaml"
    sweep.write_text(json.dumps(DOCUMENT))
    result = CliRunner().invoke(app, ["run", str(sweep), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "random @ rows of scissorhands @ 80, seed 0: 4 examples, pending on scissorhands @ 80" in result.output
    assert result.output.count("pending on") == 3 * len(BASELINES)
    assert f"{CELLS} cells" in result.output
    result = CliRunner().invoke(app, ["run", str(sweep), "--dry-run", "--set", "policies.0.matched=[randon]"])
    assert result.exit_code == 2
    assert "Did you mean 'random'" in " ".join(result.output.split())


def test_rows_that_take_fewer_bytes_are_matched_by_their_bytes() -> None:
    dropping = made_row("scissorhands", 0, budget=120)
    assert dropping.cache is not None
    assert finished(dropping).rows_of_same_bytes == pytest.approx(dropping.cache.rows_over_time_mean)
    merged = replace(dropping.cache, kept_ratio=1.0, rows_over_time_mean=504.0, payload_bytes=400_000)
    merging = replace(dropping, cache=merged)
    assert merged.full_kv_bytes == 500_000, "rows are stored in four fifths of their bytes"
    assert finished(merging).rows_of_same_bytes == pytest.approx(504 * 0.8)
