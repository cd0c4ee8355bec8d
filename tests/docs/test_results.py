"""The tables of docs/results.md are those that the records in benchmarks/ give."""

from __future__ import annotations

import json
from itertools import takewhile
from pathlib import Path

import pytest

pytest.importorskip("evaluate")

from hf_kvpolicy.eval.packed import PackedRun
from hf_kvpolicy.eval.report import markdown_table
from hf_kvpolicy.eval.report_tables import depth_table, paired_table, quality_table, tables
from hf_kvpolicy.eval.results import summaries_of

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "smollm2-135m_cpu_2026-11-30_needle_retention.json"
SHARED_PREFILL = ROOT / "benchmarks" / "smollm2-135m_cpu_2026-11-30_shared_prefill.json"
CONDENSED = ROOT / "benchmarks" / "toy_cpu_2026-11-30_layer_condensed.json"
ALLOCATION = ROOT / "benchmarks" / "smollm2-135m_cpu_2026-11-30_needle_allocation_3budgets.json"


@pytest.mark.parametrize("records", [RECORDS, ALLOCATION], ids=lambda path: path.stem)
def test_the_tables_are_those_of_the_records(records: Path) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    for _, group in tables(summaries_of(PackedRun(records))):
        for table in (quality_table(group), paired_table(group), depth_table(group)):
            assert "\n".join(markdown_table(table)) in page, "paste the lines of this table into the page"


@pytest.mark.parametrize("records", [RECORDS, ALLOCATION], ids=lambda path: path.stem)
def test_every_cell_of_the_records_was_measured(records: Path) -> None:
    summaries = summaries_of(PackedRun(records))
    assert all(summary.measured and summary.measured.n >= 20 for summary in summaries)


def test_the_ratios_of_a_shared_prefill_are_those_of_the_record() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    measures = json.loads(SHARED_PREFILL.read_text(encoding="utf-8"))["measures"]
    found = {(each["group"], each["name"].partition(",")[0]): each["value"] for each in measures}
    for clock in ("wall", "cpu"):
        above, gain = (found[group, clock] for group in ("shared/parts", "run a cell/shared"))
        assert f"| {clock} | {above:.2f} | {gain:.2f} |" in page


def test_the_losses_of_the_toys_are_those_of_the_record() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    record = json.loads(CONDENSED.read_text(encoding="utf-8"))
    for name in ("ordinary", "condensed"):
        facts = record[name]
        for way, unseen in facts["unseen_loss"].items():
            line = f"| {name} | {way} | {facts['train_loss']:.3f} | {unseen:.3f} | {facts['payload_bytes']:,} |"
            assert line in page
    assert f"{record['stored_ratio']:.3f} of the ordinary one's bytes" in page


@pytest.mark.parametrize(("budget", "answers"), [(512, 15), (256, 14)])
def test_snapkv_gives_the_first_four_digits_as_often_as_the_page_says(budget: int, answers: int) -> None:
    right = []
    for row in PackedRun(RECORDS).rows():
        if row.cell["policy"] == "snapkv" and row.cell["options"] == {"unit": "head"} and row.cell["budget"] == budget:
            assert row.quality is not None
            pairs = zip(row.quality.output_text.strip(), row.example["answers"][0], strict=False)
            right.append(len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))))
    assert right.count(4) == answers
