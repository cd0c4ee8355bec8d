"""Nothing is pooled or drawn together that was not asked alike, and the full cache is the one without options."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

from eval_fakes import FakeCache, fake_builder, made_row, tiny_loaded
from test_eval_report import folder_with, full, policy
from test_eval_report_files import varied, without_result, written
from typer.testing import CliRunner

from hf_kvpolicy.eval import niah, perplexity, ruler
from hf_kvpolicy.eval.cells import Cell, settings_of
from hf_kvpolicy.eval.cli import app
from hf_kvpolicy.eval.html_report import heat_maps
from hf_kvpolicy.eval.longbench import published_scores
from hf_kvpolicy.eval.outcomes import Outcome
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.report_tables import tables
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import run_sweep
from hf_kvpolicy.eval.statistics import paired_difference, paired_p_value
from hf_kvpolicy.eval.summary import summarise
from hf_kvpolicy.eval.sweep import parse_sweep

LONGER = {"max_new_tokens": 64}
SWEEP: dict[str, Any] = {
    "model": "tiny",
    "budgets": [64],
    "max_new_tokens": 3,
    "tasks": [{"name": "needle_single_noise", "lengths_tokens": [600], "depths": [0.5], "num_examples": 2}],
    "policies": ["snapkv"],
    "include_random": False,
}


def every_setting() -> list[Row]:
    """One cell's label under three settings: all right, then half right, then none."""
    rows = policy(4, 4)
    return [*rows, *varied(policy(2, 4), **LONGER), *varied(policy(0, 4), query_aware=False)]


def test_answers_of_several_lengths_are_told_apart_only_where_there_are_several() -> None:
    cell = Cell(task="a", length_tokens=512, policy="full", budget=None)
    setting = settings_of([cell, replace(cell, max_new_tokens=64), replace(cell, task="b", query_aware=False)])
    assert setting(cell) == ", answers of 16 tokens"
    assert setting(replace(cell, max_new_tokens=64)) == ", answers of 64 tokens"
    assert setting(replace(cell, task="b", query_aware=False)) == ", question unseen"


def test_tables_and_maps_are_one_a_setting() -> None:
    summaries = summarise([*full(4), *varied(full(4), **LONGER), *every_setting()])
    assert [(title.partition(" (")[0], len(group)) for title, group in tables(summaries)] == [
        ("needle_single_noise, 512 tokens, answers of 16 tokens", 2),
        ("needle_single_noise, 512 tokens, answers of 64 tokens", 2),
        ("needle_single_noise, 512 tokens, question unseen, answers of 16 tokens", 1),
    ]
    two_depths = [
        row
        for depth in (0.1, 0.9)
        for row in varied(every_setting(), example={"depth_ratio": depth, "id": f"d{depth}"})
    ]
    titles = {found.title for found in heat_maps(summarise(two_depths))}
    assert len(titles) == 3


@pytest.mark.parametrize(
    ("conclude", "numbers"),
    [
        (niah._print_maps, ["1.00", "0.50", "0.00"]),
        (ruler._print_means, ["100.00 over 1", "50.00 over 1", "0.00 over 1"]),
    ],
)
def test_the_commands_numbers_are_one_a_setting(
    conclude: Any, numbers: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    conclude(folder_with(every_setting(), tmp_path))
    text = capsys.readouterr().out
    for number, ending in zip(
        numbers,
        (", answers of 16 tokens", ", answers of 64 tokens", ", question unseen, answers of 16 tokens"),
        strict=True,
    ):
        (_, after) = text.split(f"snapkv @ 64{ending}", 1)
        assert number in after.split("snapkv")[0]


def test_perplexities_and_published_scores_are_one_a_setting(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    perplexity._print_perplexities(folder_with(every_setting(), tmp_path))
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) == 3
    scores = published_scores(every_setting())
    assert [found["needle_single_noise"] for found in scores.values()] == [100.0, 50.0, 0.0]


def test_only_the_full_cache_without_options_is_the_baseline() -> None:
    """Rows in few bits lose something too: 4 of 8 here."""
    few_bits = varied(full(8, output="no")[:4] + full(8)[4:], options={"quantize": "int8"})
    for rows in ([*full(), *few_bits, *policy(8, 8)], [*full(), *policy(8, 8), *few_bits]):
        by_label = {summary.cell.label: summary for summary in summarise(rows)}
        own = by_label["full(quantize=int8)"]
        assert own.outcome is not Outcome.QUALITY_VALID
        assert by_label["full"].outcome is Outcome.QUALITY_VALID
    from hf_kvpolicy.eval.pairing import pairs

    found = {(pair.summary.cell.label, pair.baseline): pair.score.mean for pair in pairs(summarise(rows))}
    assert found == {("full(quantize=int8)", "full"): -0.5, ("snapkv @ 64", "full"): 0.0}


def test_one_graded_pair_has_a_p_of_one(tmp_path: Path) -> None:
    assert paired_p_value({"a": 1.0}, {"a": 0.5}) == 1.0
    difference = paired_difference({"a": 1.0}, {"a": 0.5})
    assert difference is not None
    assert (difference.mean, difference.n) == (0.5, 1)
    folder_with([*full(1), *policy(0, 1)], tmp_path)
    for metric in ("score", "nll", "bytes", "time"):
        result = CliRunner().invoke(app, ["compare", str(tmp_path), "--metric", metric])
        assert result.exit_code == 0, result.exception


@dataclass
class NoNumbers(FakeCache):
    """Reads as a sound cache, and turns the model's logits into no numbers."""

    def finish_prefill(self) -> None:
        super().finish_prefill()
        for layer in self.layers:
            layer.values = torch.full_like(layer.values, math.nan)


def test_a_cell_without_numbers_has_no_result(tmp_path: Path) -> None:
    def build(cell: Cell) -> FakeCache:
        return NoNumbers(keep_rows=64) if cell.policy == "snapkv" else fake_builder(cell)

    outcome = run_sweep(parse_sweep(SWEEP), tiny_loaded(), RunDirectory(tmp_path), build, say=lambda line: None)
    assert outcome.failed == 1
    (found,) = [summary for summary in summarise(RunDirectory(tmp_path).rows()) if summary.cell.policy == "snapkv"]
    assert found.measured is None
    assert found.outcome is Outcome.RUNTIME_INADMISSIBLE
    assert "no finite numbers" in str(found.reason)


def test_a_budget_that_holds_some_prompts_is_run_for_all(tmp_path: Path) -> None:
    """Prompts of a cell differ in length, and its seeds are pooled: what holds the first may not hold the next."""
    loaded = tiny_loaded()

    def rows(budget: int, folder: str, **changes: Any) -> list[Row]:
        config = parse_sweep({**SWEEP, "budgets": [budget], **changes})
        run_sweep(config, loaded, RunDirectory(tmp_path / folder), fake_builder, say=lambda line: None)
        return [row for row in RunDirectory(tmp_path / folder).rows() if row.cell["policy"] == "snapkv"]

    task = {**SWEEP["tasks"][0], "num_examples": 6}
    tokens = [row.example["prompt_tokens"] for row in rows(64, "lengths", tasks=[task], seeds=[0, 1])]
    shorter, longest = max(tokens[:1]), max(tokens)
    assert shorter < longest
    first = rows(shorter, "grown", tasks=[{**task, "num_examples": 1}])
    assert {row.status for row in first} == {"equals-full"}
    grown = rows(shorter, "grown", tasks=[task], seeds=[0, 1])
    assert {row.status for row in grown} == {"ok"}
    assert len(grown) == 12
    assert {row.status for row in rows(longest, "held", tasks=[task], seeds=[0, 1])} == {"equals-full"}


def test_a_cell_of_which_part_was_not_run_equals_nothing() -> None:
    equal = without_result("snapkv", "equals-full", "equals-full", "the budget takes nothing from any prompt")
    summary = summarise([*full(2), equal, *policy(1, 2)[1:]])[-1]
    assert summary.outcome is Outcome.UNMEASURED
    assert "from 1 of 2 prompts" in str(summary.reason)
    failed = made_row(
        "snapkv", 1, budget=64, status="failed: x", outcome="runtime-inadmissible", reason="x", quality=None
    )
    assert summarise([*full(2), equal, failed])[-1].outcome is Outcome.RUNTIME_INADMISSIBLE


HOSTILE = "[/b] :smile: $x$ <img src=x> a\\|b ![c](http://d)"


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    rows = [
        *full(2),
        *varied(policy(1, 2), options={"profile": HOSTILE}),
        without_result("h2o", "failed: x", "runtime-inadmissible", HOSTILE),
    ]
    result = CliRunner().invoke(app, ["report", str(folder_with(rows, tmp_path / "run").path)])
    assert result.exit_code == 0, result.exception
    assert "\N{SMILING FACE WITH OPEN MOUTH AND SMILING EYES}" not in result.output
    marked = written(rows, tmp_path, evidence_class=HOSTILE)["report.md"]
    assert "<img" not in marked
    assert "](http" not in marked
    # One pipe a column, however a reader treats what stands before it.
    (line,) = [line for line in marked.splitlines() if line.startswith("| h2o @ 64 | runtime")]
    assert line.count("|") == 9
    assert "a\\&#124;b" in line


def test_what_is_matched_to_a_cell_that_was_not_run_is_done_with_it(tmp_path: Path) -> None:
    policy = {"name": "snapkv", "budgets": [5000], "matched": ["sliding_window"]}

    def run() -> tuple[int, set[str]]:
        config = parse_sweep({**SWEEP, "policies": [policy]})
        outcome = run_sweep(config, tiny_loaded(), RunDirectory(tmp_path), fake_builder, say=lambda line: None)
        return outcome.written, {row.status for row in RunDirectory(tmp_path).rows() if row.cell["policy"] != "full"}

    assert run() == (6, {"equals-full"})
    assert run() == (0, {"equals-full"})
