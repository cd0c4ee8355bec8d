"""Differences between policies on the same examples, by hand-made rows."""

from __future__ import annotations

import pytest

pytest.importorskip("evaluate")

from eval_fakes import made_row

from hf_kvpolicy.eval.pairing import pairs
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.report import markdown_table
from hf_kvpolicy.eval.report_tables import COLUMNS, depth_table, paired_table, table_cells
from hf_kvpolicy.eval.summary import summarise


def cell(policy: str, budget: int | None, right: int, count: int = 10) -> list[Row]:
    """Rows of which the first `right` are right."""
    return [made_row(policy, i, budget=budget, output="7" if i < right else "no") for i in range(count)]


def test_a_policy_is_compared_at_its_own_budget() -> None:
    rows = [*cell("full", None, 10), *cell("sliding_window", 64, 2), *cell("sliding_window", 128, 5)]
    found = pairs(summarise([*rows, *cell("h2o", 64, 4), *cell("h2o", 128, 4)]))
    differences = {(p.summary.cell.policy, p.summary.cell.budget, p.baseline): p.score.mean for p in found}
    assert differences == {
        ("sliding_window", 64, "full"): pytest.approx(-0.8),
        ("sliding_window", 128, "full"): pytest.approx(-0.5),
        ("h2o", 64, "full"): pytest.approx(-0.6),
        ("h2o", 64, "sliding_window"): pytest.approx(0.2),
        ("h2o", 128, "full"): pytest.approx(-0.6),
        ("h2o", 128, "sliding_window"): pytest.approx(-0.1),
    }
    assert {p.n for p in found} == {10}


def test_pairing_leaves_out_how_hard_an_example_is() -> None:
    """NLLs that differ between examples but by a constant between policies have an interval of no width."""
    ours = cell("h2o", 64, 0)
    theirs = cell("sliding_window", 64, 0)
    found = [pair for pair in pairs(summarise([*theirs, *ours])) if pair.baseline == "sliding_window"]
    assert [(p.answer_nll.low, p.answer_nll.high) for p in found] == [(0.0, 0.0)]


def test_a_failed_cell_and_a_missing_baseline_give_no_difference() -> None:
    failed = made_row("sliding_window", 0, budget=64, status="failed: x", quality=None)
    assert pairs(summarise([failed, *cell("h2o", 64, 4)])) == []
    assert markdown_table(paired_table(summarise([failed, *cell("h2o", 64, 4)]))) == []


def test_other_tasks_are_no_baseline() -> None:
    elsewhere = [Row(**{**_fields(r), "cell": {**r.cell, "length_tokens": 1024}}) for r in cell("full", None, 10)]
    assert pairs(summarise([*elsewhere, *cell("h2o", 64, 4)])) == []


def test_the_same_question_without_its_text_is_no_pair() -> None:
    def asked(policy: str, prompt: str) -> list[Row]:
        return [
            made_row(policy, i, example={"id": f"example-{i}", "answers": ["7"], "prompt_sha256": f"{prompt}-{i}"})
            for i in range(4)
        ]

    summaries = summarise([*asked("full", "text"), *asked("no_context", "bare"), *asked("h2o", "text")])
    assert [(p.summary.cell.policy, p.baseline) for p in pairs(summaries)] == [("h2o", "full")]
    bare = next(summary for summary in summaries if summary.cell.policy == "no_context")
    assert table_cells(bare)[COLUMNS.index("of full K/V")] == "", "its own prompt's full cache says nothing"


def _fields(row: Row) -> dict[str, object]:
    return {name: getattr(row, name) for name in Row.__slots__}


def test_the_tables_of_differences_and_depths() -> None:
    deep = [
        made_row("h2o", i, budget=64, example={"id": f"example-{i}", "answers": ["7"], "depth_ratio": i % 2 / 2})
        for i in range(4)
    ]
    summaries = summarise([*cell("full", None, 4, 4), *deep])
    assert markdown_table(paired_table(summaries)) == [
        "| policy | score - full | NLL - full |",
        "| --- | --- | --- |",
        "| h2o @ 64 | 0.00 [-0.49, 0.49] | 0.00 [0.00, 0.00] |",
    ]
    assert markdown_table(depth_table(summaries))[0] == "| policy | depth 0 | depth 0.5 |"
    assert markdown_table(depth_table(summaries))[-1] == "| h2o @ 64 | 1.00 / 0.10 | 1.00 / 0.10 |"
    assert markdown_table(depth_table(summaries))[2] == "| full | - / - | 1.00 / 0.10 |"


def test_a_task_without_depths_has_no_depth_table() -> None:
    rows = [made_row("full", i, example={"id": f"example-{i}", "answers": ["7"]}) for i in range(2)]
    assert markdown_table(depth_table(summarise(rows))) == []
