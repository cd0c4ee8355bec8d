"""The tables of docs/results.md are those that the records in benchmarks/ give."""

from __future__ import annotations

import json
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

import pytest

pytest.importorskip("evaluate")

from hf_kvpolicy.eval.outcomes import Outcome
from hf_kvpolicy.eval.packed import PackedRun
from hf_kvpolicy.eval.report import markdown_table, report_markdown
from hf_kvpolicy.eval.report_overview import overview_table
from hf_kvpolicy.eval.report_tables import depth_table, paired_table, quality_table, tables
from hf_kvpolicy.eval.results import CellSummary, results_of, summaries_of

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "smollm2-135m_cpu_2026-11-30_needle_retention.json"
SHARED_PREFILL = ROOT / "benchmarks" / "smollm2-135m_cpu_2026-11-30_shared_prefill.json"
CONDENSED = ROOT / "benchmarks" / "toy_cpu_2026-11-30_layer_condensed.json"
ALLOCATION = ROOT / "benchmarks" / "smollm2-135m_cpu_2026-11-30_needle_allocation_3budgets.json"
SURFACE = ROOT / "benchmarks" / "smollm2-135m_cpu_2026-11-30_surface.json"


@lru_cache
def surface() -> list[CellSummary]:
    """Return the surface's summaries; making them takes seconds."""
    return summaries_of(PackedRun(SURFACE))


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


def test_the_surface_is_that_of_its_records() -> None:
    page, source = (ROOT / "docs" / "results.md").read_text(encoding="utf-8"), PackedRun(SURFACE)
    results = results_of(source)
    assert "\n".join(markdown_table(overview_table(result.summary for result in results))) in page
    assert f"each of the {len(results)} cells" in page
    report = SURFACE.with_suffix("") / "report.md"
    found = report_markdown(source.read_run(), results, image=Path("report.png"))
    assert report.read_text(encoding="utf-8") == found, "write this report anew with kvpolicy eval report"


def test_what_the_page_says_of_the_surface_s_outcomes() -> None:
    outcomes: dict[str, set[Outcome]] = {}
    for summary in surface():
        cell = summary.cell
        assert summary.measured is not None
        assert summary.measured.n == {"perplexity_pydoc": 4}.get(cell.task, 20)
        if cell.matched_to is None and cell.policy not in ("full", "no_context"):
            outcomes.setdefault(cell.label, set()).add(summary.outcome)
    lossless = {label for label, found in outcomes.items() if Outcome.QUALITY_DEGRADED not in found}
    assert lossless == {"headkv @ 512"}
    assert outcomes["headkv @ 512"] == {Outcome.UNMEASURED}


def test_what_the_page_says_of_the_surface_s_likelihoods() -> None:
    found: dict[str, dict[str, float]] = {}
    for title, group in tables(surface()):
        found[title] = {each.cell.label: each.measured.answer_nll.mean for each in group if each.measured is not None}
    for nlls in found.values():
        for label in ("fastgen(recovery=0.3354)", "minicache"):
            assert nlls[label] > nlls[f"random @ rows of {label}"]
    texts = next(nlls for title, nlls in found.items() if title.startswith("perplexity"))
    lost = {label: nll - texts["full"] for label, nll in texts.items()}
    assert [round(lost[f"sliding_window @ {budget}"], 2) for budget in (512, 128, 64)] == [0.67, 0.93, 1.22]
    others = ("sliding_window", "random", "fastgen", "minicache")
    for nats, budgets in ((0.165, ("512", "128")), (0.3, ("64",))):
        assert max(lost[label] for label in lost if label.endswith(budgets) and not label.startswith(others)) < nats


def test_what_the_page_says_of_the_surface_at_64_rows() -> None:
    found: dict[str, dict[str, float]] = {}
    for summary in surface():
        cell = summary.cell
        if cell.label.endswith("@ 64") and cell.matched_to is None and summary.measured and summary.measured.score:
            found.setdefault(cell.task, {}).setdefault(cell.policy, 0.0)
            found[cell.task][cell.policy] = max(found[cell.task][cell.policy], summary.measured.score.mean)
    for task in ("ruler_niah_single_2_pydoc", "ruler_niah_multikey_1_pydoc"):
        assert {policy for policy, score in found[task].items() if score} == {"headkv"}
    chosen = ("snapkv", "adakv", "pyramidkv")
    assert {found["factbook_qa"][policy] for policy in chosen} == {0.15}
    quotes = sorted(round(found["quote_pydoc"][policy], 2) for policy in chosen)
    assert (quotes[0], quotes[-1], round(found["quote_pydoc"]["sliding_window"], 2)) == (0.28, 0.31, 0.11)


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
