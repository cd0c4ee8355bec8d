"""Summaries and reports from hand-made rows."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")

from eval_fakes import made_row

from hf_kvpolicy.errors import ConfigError, IntegrityError
from hf_kvpolicy.eval.cells import Cell
from hf_kvpolicy.eval.figures import draw_curves, styles_of
from hf_kvpolicy.eval.outcomes import Outcome
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.report import write_report
from hf_kvpolicy.eval.report_overview import overview_table
from hf_kvpolicy.eval.report_tables import COLUMNS, table_cells
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.summary import summarise
from hf_kvpolicy.eval.terminal import print_tables

RUN: dict[str, Any] = {
    "identity": {
        "model": "tiny",
        "dtype": "torch.float32",
        "template_sha256": "ab" * 32,
        "uses_chat_template": True,
    },
    "identity_sha256": "x",
    "environments": {"place": {"device": "cpu", "threads": 1, "torch": "2"}},
    "evidence_class": "locally measured",
    "tasks": {"needle_single_noise": {"haystack": "noise"}},
}


def full(count: int = 8, output: str = "7") -> list[Row]:
    return [made_row("full", index, output=output) for index in range(count)]


def folder_with(rows: list[Row], path: Path, **run: Any) -> RunDirectory:
    directory = RunDirectory(path)
    directory.begin({name: value for name, value in {**RUN, **run}.items() if name != "environments"})
    for key, place in RUN["environments"].items():
        directory.add_environment(key, place)
    for order, row in enumerate(rows):
        directory.open_cell(Cell(**row.cell), row.cell_key, order)
        directory.append(row)
    return directory


def policy(right: int, count: int, budget: int = 64) -> list[Row]:
    """Rows of which the first `right` are right."""
    return [made_row("snapkv", i, budget=budget, output="7" if i < right else "wrong") for i in range(count)]


def test_an_overview_has_a_line_a_policy_and_a_column_a_task_point() -> None:
    longer = [
        replace(row, cell={**row.cell, "length_tokens": 1024}, cell_key=f"{row.cell_key}-1024") for row in full(3)
    ]
    table = overview_table(summarise([*full(3), *policy(0, 3), *longer]))
    assert table.columns == ["policy", "needle_single_noise, 512 tokens", "needle_single_noise, 1024 tokens"]
    # made_row gives a wrong answer the NLL 3 + index / 10.
    assert table.rows == [["full", "1.00 / 0.10", "1.00 / 0.10"], ["snapkv @ 64", "0.00 / 3.10", ""]]
    assert not overview_table(summarise([*full(3), *policy(0, 3)])).rows


def likelihoods(policy: str, nlls: list[float]) -> list[Row]:
    """Rows of a task that generates nothing: the score is the likelihood itself."""
    rows = [made_row(policy, index, budget=None if policy == "full" else 64) for index in range(len(nlls))]
    return [
        replace(
            row,
            cell={**row.cell, "max_new_tokens": 0},
            example={**row.example, "metric": "likelihood"},
            quality=replace(row.quality, answer_nll=nll, score=math.exp(-nll)),  # type: ignore[type-var]
        )
        for row, nll in zip(rows, nlls, strict=True)
    ]


@pytest.mark.parametrize(
    ("lost", "count", "outcome"),
    [
        (0.2, 60, Outcome.QUALITY_DEGRADED),
        (0.01, 60, Outcome.QUALITY_VALID),
        (0.2, 4, Outcome.QUALITY_DEGRADED),
        (0.01, 4, Outcome.UNMEASURED),
        (0.2, 1, Outcome.UNMEASURED),
    ],
)
def test_likelihoods_are_compared_in_nats(lost: float, count: int, outcome: Outcome) -> None:
    """At 4 nats a token a likelihood is 0.018, and no loss of it reaches 0.05."""
    full_nlls = [4.0 + index / 100 for index in range(count)]
    worse = [nll + lost + (-1) ** index / 1000 for index, nll in enumerate(full_nlls)]
    summaries = summarise([*likelihoods("full", full_nlls), *likelihoods("snapkv", worse)])
    assert [summary.outcome for summary in summaries] == [Outcome.QUALITY_VALID, outcome]


def test_outcomes_compare_with_the_full_cache_example_by_example() -> None:
    """Of 100 examples the full cache is right on all. Tango: of 100, 0 lost is [-0.04, 0.04], 20 is [-0.29, -0.12]."""
    summaries = summarise([*full(100), *policy(100, 100, 512), *policy(96, 100, 256), *policy(80, 100, 128)])
    assert [s.outcome for s in summaries] == [
        Outcome.QUALITY_VALID,
        Outcome.QUALITY_VALID,
        Outcome.UNMEASURED,
        Outcome.QUALITY_DEGRADED,
    ]
    assert [s.measured.score.mean for s in summaries if s.measured] == [1.0, 1.0, 0.96, 0.8]
    assert summaries[2].reason == "inconclusive at n = 100"
    assert table_cells(summaries[2])[-1] == "unmeasured: inconclusive at n = 100"


def test_a_few_examples_can_show_a_loss_but_not_that_there_is_none() -> None:
    summaries = summarise([*full(9), *policy(9, 9, 128), *policy(0, 9, 64)])
    assert [s.outcome for s in summaries] == [Outcome.QUALITY_VALID, Outcome.UNMEASURED, Outcome.QUALITY_DEGRADED]
    assert table_cells(summaries[1])[-1] == "unmeasured: inconclusive at n = 9 (smoke)"
    assert all(s.is_smoke for s in summaries)


def test_graded_scores_that_are_all_equal_need_examples_enough() -> None:
    """A bootstrap of equal differences has no width, at two examples as at fifty."""

    def graded(name: str, count: int) -> list[Row]:
        rows = [made_row(name, i, budget=None if name == "full" else 64) for i in range(count)]
        return [replace(row, quality=replace(row.quality, score=0.75)) for row in rows if row.quality]

    outcomes = [summarise([*graded("full", n), *graded("snapkv", n)])[1].outcome for n in (2, 49, 50)]
    assert outcomes == [Outcome.UNMEASURED, Outcome.UNMEASURED, Outcome.QUALITY_VALID]


def test_a_loss_within_delta_is_none() -> None:
    """Of 100 examples 4 are lost: [-0.10, -0.01]. Whether that is a loss depends on what is held to be none."""
    rows = [*full(100), *policy(96, 100)]
    assert [summarise(rows, delta=delta)[1].outcome for delta in (0.0, 0.05, 0.1)] == [
        Outcome.QUALITY_DEGRADED,
        Outcome.UNMEASURED,
        Outcome.QUALITY_VALID,
    ]


def test_the_report_uses_the_delta_of_its_run(tmp_path: Path) -> None:
    directory = folder_with([*full(100), *policy(96, 100)], tmp_path, delta=0.1)
    assert write_report(directory, tmp_path)[1].outcome is Outcome.QUALITY_VALID
    assert "lies below -0.1" in (tmp_path / "report.md").read_text()


def test_fifty_examples_are_no_smoke() -> None:
    assert not summarise(full(50))[0].is_smoke


def test_a_task_the_full_cache_cannot_do_is_not_interpretable() -> None:
    policy = [made_row("snapkv", index, budget=64) for index in range(8)]
    summaries = summarise([*full(output="wrong"), *policy])
    assert [s.interpretable for s in summaries] == [False, False]
    assert {s.outcome for s in summaries} == {Outcome.UNMEASURED}


def test_without_a_full_baseline_nothing_is_interpretable() -> None:
    assert not summarise([made_row("snapkv", 0, budget=64)])[0].interpretable


def test_one_failed_row_takes_the_score_from_its_cell() -> None:
    rows = [made_row("snapkv", index, budget=64) for index in range(7)]
    failed = made_row(
        "snapkv",
        7,
        budget=64,
        status="failed: policy did not act",
        outcome="unmeasured",
        reason="all rows are still stored",
        quality=None,
    )
    summary = summarise([*full(), *rows, failed])[1]
    assert (summary.status, summary.measured) == ("failed: policy did not act", None)
    assert summary.outcome is Outcome.UNMEASURED


def test_seeds_are_pooled() -> None:
    other = [made_row("full", index) for index in range(8, 12)]
    other = [Row.from_mapping({**_mapping(row), "cell": {**row.cell, "seed": 1}}) for row in other]
    (summary,) = summarise([*full(), *other])
    assert summary.measured is not None
    assert summary.measured.n == 12


def _mapping(row: Row) -> dict[str, Any]:
    import json

    found: dict[str, Any] = json.loads(row.to_json())
    return {**found, "cell": row.cell, "cell_key": row.cell_key}


def test_rows_survive_the_trip_to_disk(tmp_path: Path) -> None:
    rows = [
        *full(2),
        made_row("snapkv", 0, budget=64, status="failed: x", quality=None, cache=None, timing=None),
    ]
    assert folder_with(rows, tmp_path).rows() == rows


def test_rows_of_another_schema_are_refused() -> None:
    with pytest.raises(IntegrityError, match="Run the sweep again"):
        Row.from_mapping({**_mapping(full(1)[0]), "schema_version": 99})


def test_report_has_tables_failures_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = made_row("random", 0, budget=64, status="failed: x", outcome="unmeasured", reason="why", quality=None)
    rows = [*full(), *[made_row("snapkv", index, budget=64) for index in range(8)], failed]
    print_tables(write_report(folder_with(rows, tmp_path), tmp_path))
    text = (tmp_path / "report.md").read_text()
    assert "| full | 8 smoke | 1.00 [0.68, 1.00] |" in text
    assert "| snapkv @ 64 | 8 smoke |" in text
    assert "64.0 (64-64) | 64.0 | 0.128 | 0.062 | 13.1% |" in text
    assert "| random @ 64 | unmeasured | failed: x | why | needle_single_noise | 512 | seen | 1 |" in text
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
    assert "slack (slots without a row)" in text
    assert "needle_single_noise, 512 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("columns", [80, 100, 240])
def test_tables_fit_the_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    print_tables(summarise([*full(), *[made_row("snapkv", index, budget=64) for index in range(8)]]))
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= columns
    assert ("cost" in printed.splitlines()[0] + printed) is (columns < 150)
    for column in COLUMNS:
        assert column in " ".join(printed.split()) or columns < 150
    assert "slack" in printed


def test_the_plot_shows_the_full_cache_as_a_point() -> None:
    from matplotlib.figure import Figure

    panel, summaries = Figure().subplots(), summarise([*full(), *[made_row("snapkv", i, budget=64) for i in range(8)]])
    draw_curves(panel, summaries, lambda m: m.score, styles_of(summaries))
    drawn = {container.get_label(): container for container in panel.containers}
    assert set(drawn) == {"full", "snapkv"}
    assert drawn["full"][0].get_marker() == "s"


def test_a_task_out_of_reach_is_marked_in_the_report(tmp_path: Path) -> None:
    write_report(folder_with(full(output="wrong"), tmp_path), tmp_path)
    assert "not interpretable: the full cache does not solve this task" in (tmp_path / "report.md").read_text()


def test_an_empty_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no rows yet"):
        write_report(folder_with([], tmp_path), tmp_path)
    with pytest.raises(ConfigError, match=r"no run\.json"):
        write_report(RunDirectory(tmp_path / "absent"), tmp_path)


@pytest.mark.parametrize(("floor_right", "interpretable"), [(0, True), (2, True), (3, False)])
def test_a_floor_decides_whether_a_task_says_anything(floor_right: int, interpretable: bool) -> None:
    """The full cache answers 4 of 10: below one half, but 0.2 above what is answered without the text."""
    full_rows = [made_row("full", i, output="7" if i < 4 else "wrong") for i in range(10)]
    floor_rows = [made_row("no_context", i, output="7" if i < floor_right else "wrong") for i in range(10)]
    summaries = summarise([*full_rows, *floor_rows, *policy(3, 10)])
    assert {summary.interpretable for summary in summaries} == {interpretable}
    assert {summary.floor_score for summary in summaries} == {floor_right / 10}
    assert not summarise([*full_rows, *policy(3, 10)])[0].interpretable
