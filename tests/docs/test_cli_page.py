"""docs/cli.md describes what a report says: every outcome, and every column of report.csv."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("evaluate")
pytest.importorskip("scipy")

from hf_kvpolicy.eval.csv_report import report_csv
from hf_kvpolicy.eval.outcomes import Outcome

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")


def first_column(table: str) -> set[str]:
    return {name for line in table.splitlines() for name in re.findall(r"`(\w[\w-]*)`", line.split("|")[1])}


def test_every_outcome_is_described() -> None:
    table = PAGE.partition("| outcome | what it says |")[2].partition("\n\n")[0].lstrip()
    assert first_column(table) == {str(outcome) for outcome in Outcome}


def test_every_column_of_the_csv_is_described() -> None:
    section = PAGE.partition("\n### report.csv\n")[2].partition("\n## ")[0]
    described = first_column(section.partition("| column | meaning |")[2].strip()) - {"score_at_depth_D"}
    columns = {re.sub("_(low|high)$", "", name) for name in report_csv([]).strip().split(",")}
    columns = {re.sub("_(minus|paired_with)_(full|sliding_window|random)$", r"_\1_X", name) for name in columns}
    assert described - {"answer_nll_at_depth_D"} == columns
