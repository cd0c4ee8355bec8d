"""The page and the lines of a report: nothing is dropped, nothing is interpreted, scales are fixed."""

from __future__ import annotations

import csv
import html
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("evaluate")
pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")

from eval_fakes import made_row
from test_eval_report import folder_with, full, policy

from hf_kvpolicy.eval.figures import draw_curves, draw_front, draw_heat_map, page_panel, styles_of, svg_of
from hf_kvpolicy.eval.html_report import heat_maps
from hf_kvpolicy.eval.packed import PackedRun, write_packed
from hf_kvpolicy.eval.pareto import on_front
from hf_kvpolicy.eval.records import Row
from hf_kvpolicy.eval.report import FILES, write_report
from hf_kvpolicy.eval.report_notes import reading_notes
from hf_kvpolicy.eval.report_tables import tables
from hf_kvpolicy.eval.results import results_of
from hf_kvpolicy.eval.summary import CellSummary, summarise

HOSTILE = '<script>alert("1 & 2")</script>'
UNSEEN = {"query_aware": False}


def varied(rows: list[Row], *, example: dict[str, Any] | None = None, **cell: Any) -> list[Row]:
    """The same rows of another cell, or with more known of their examples."""
    name = repr(cell)
    return [
        replace(
            row,
            cell={**row.cell, **cell},
            cell_key=row.cell_key + name,
            row_key=row.row_key + name,
            example={**row.example, **(example or {})},
        )
        for row in rows
    ]


def without_result(name: str, status: str, outcome: str, reason: str) -> Row:
    gone = {"quality": None, "cache": None, "timing": None}
    return made_row(name, 0, budget=64, status=status, outcome=outcome, reason=reason, **gone)


def every_kind() -> list[Row]:
    return [
        *full(),
        *policy(4, 8, 64),
        *policy(8, 8, 128),
        *varied([*full(), *policy(1, 8)], **UNSEEN),
        *varied(policy(2, 8), options={"unit": "a<b & c"}),
        without_result("h2o", "failed: out of memory", "runtime-inadmissible", f"it said {HOSTILE}"),
        without_result("adakv", "failed: CheckpointAdmissionError", "checkpoint-incompatible", "no such heads"),
        without_result("keyformer", "equals-full", "equals-full", "the budget takes nothing from any prompt"),
    ]


class Cells(HTMLParser):
    """The texts of every line of every table."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[list[str]] = []
        self.inside = False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag == "tr":
            self.lines.append([])
        if tag == "td":
            self.lines[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = self.inside and tag != "td"

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.lines[-1][-1] += data


def written(rows: list[Row], path: Path, **run: Any) -> dict[str, str]:
    write_report(folder_with(rows, path, **run), path)
    return {name: (path / name).read_text(encoding="utf-8") for name in FILES if not name.endswith("png")}


def csv_lines(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(text.splitlines()))


def test_every_cell_is_in_the_page_with_what_became_of_it(tmp_path: Path) -> None:
    files, summaries = written(every_kind(), tmp_path), summarise(every_kind())
    assert len(summaries) == 9
    parser = Cells()
    parser.feed(files["report.html"])
    for s in summaries:
        question = "seen" if s.cell.query_aware else "unseen"
        place = ["needle_single_noise", "512", question]
        (found,) = [cells for cells in parser.lines if cells[:1] == [s.cell.label] and cells[4:7] == place]
        assert found[1:4] == [str(s.outcome), s.status, s.reason or ""]
        assert f"| {s.cell.label} | {s.outcome} | {s.status} |" in html.unescape(files["report.md"])
    for count in ("runtime-inadmissible: 1", "checkpoint-incompatible: 1", "equals-full: 1", "backend-incompatible: 0"):
        assert count in files["report.html"]


def test_whatever_labels_and_reasons_hold_is_text(tmp_path: Path) -> None:
    page = written(every_kind(), tmp_path, evidence_class=HOSTILE)["report.html"]
    assert "<script" not in page
    assert html.escape(HOSTILE, quote=False) in page.replace("&#34;", '"')
    assert "snapkv(unit=a&lt;b &amp; c)" in page
    assert "a<b" not in page


def test_the_page_needs_nothing_beside_it(tmp_path: Path) -> None:
    page = written(every_kind(), tmp_path)["report.html"]
    assert not re.search(r"""<(link|img|script|iframe)\b|\bsrc=|@import|url\((?!#)""", page)
    assert {link for link in re.findall(r'href="([^"]*)"', page) if not link.startswith("#")} == set()
    names = re.findall(r'\bid="([^"]+)"', page)
    assert len(names) == len(set(names)), "figures share no ids"
    assert {link for pair in re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page) for link in pair if link} <= set(
        names
    )


def test_the_report_of_a_packed_run_is_that_of_its_folder(tmp_path: Path) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    other.mkdir()
    directory = folder_with(every_kind(), folder, model_source="/somewhere")
    write_packed(directory.read_run(), directory.rows(), tmp_path / "run.json")
    write_report(directory, folder)
    write_report(PackedRun(tmp_path / "run.json"), other)
    for name in FILES:
        assert (folder / name).read_bytes() == (other / name).read_bytes()


def test_lines_have_the_numbers_in_full(tmp_path: Path) -> None:
    rows = [*every_kind(), *varied(policy(3, 8, 32), example={"truncated": True})]
    results = results_of(folder_with(rows, tmp_path / "run"))
    lines = csv_lines(written(rows, tmp_path)["report.csv"])
    assert [line["label"] for line in lines] == [result.label for result in results]
    for line, summary in zip(lines, (result.summary for result in results), strict=True):
        assert (line["status"], line["outcome"], line["reason"]) == (
            summary.status,
            str(summary.outcome),
            summary.reason or "",
        )
        found = summary.measured
        if found is None:
            assert line["score"] == line["measured_bytes"] == line["on_pareto_front"] == ""
            continue
        interval = [float(line[name]) for name in ("score", "score_low", "score_high")]
        assert interval == [found.score.mean, found.score.low, found.score.high]
        assert float(line["answer_nll"]) == found.answer_nll.mean
        assert float(line["decode_ms_per_token"]) == found.decode_ms_per_token
        assert line["kl_to_full_nats"] == line["top1_agreement_ratio"] == ""
    assert float(lines[1]["score_minus_full"]) == -0.5
    assert float(lines[1]["score_at_depth_0.5"]) == 0.5
    assert (lines[1]["truncated_examples"], lines[-1]["truncated_examples"]) == ("", "8")


def test_agreement_with_the_full_cache_is_shown_where_every_row_has_it(tmp_path: Path) -> None:
    def agreeing(rows: list[Row], kl: float) -> list[Row]:
        found = [(row, row.quality) for row in rows if row.quality is not None]
        return [replace(row, quality=replace(q, kl_to_full_nats=kl, top1_agreement_ratio=0.75)) for row, q in found]

    rows = [*full(4), *agreeing(policy(2, 4), 0.25), *agreeing(policy(2, 4, 32), 1.0)[:3], *policy(2, 4, 32)[3:]]
    lines = csv_lines(written(rows, tmp_path)["report.csv"])
    assert [line["kl_to_full_nats"] for line in lines] == ["", "0.25", ""]
    assert [line["top1_agreement_ratio"] for line in lines] == ["", "0.75", ""]
    assert "| 0.250 | 0.750 |" in (tmp_path / "report.md").read_text()


def test_questions_seen_and_unseen_are_two_tables() -> None:
    groups = tables(summarise([*full(), *policy(4, 8), *varied([*full(), *policy(1, 8)], **UNSEEN)]))
    assert [title for title, _ in groups] == [
        "needle_single_noise, 512 tokens",
        "needle_single_noise, 512 tokens, question unseen",
    ]
    assert [[s.cell.query_aware for s in group] for _, group in groups] == [[True, True], [False, False]]


def test_notes_say_what_the_rows_say_of_their_prompts(tmp_path: Path) -> None:
    def notes(rows: list[Row], name: str) -> str:
        return " ".join(reading_notes({}, results_of(folder_with(rows, tmp_path / name))))

    seen = notes([*full(4), *policy(2, 4)], "seen")
    assert "Every prompt carried its question" in seen
    assert "Whether any of the 4 prompts was cut is not recorded." in seen
    whole, cut = full(4), varied([*full(1), *policy(1, 1)], example={"truncated": True})
    whole = varied(whole, example={"truncated": False})
    unseen = notes(varied([*whole[1:], *cut], **UNSEEN), "unseen")
    assert "Question unseen" in unseen
    assert "Every prompt" not in unseen
    assert "1 of 4 prompts were cut" in unseen
    both = notes([*whole, *varied(whole, **UNSEEN)], "both")
    assert "Elsewhere the question was in the prompt." in both
    assert "None of 8 prompts was cut." in both


@pytest.mark.parametrize("score", [0.9, 0.0, 1.0])
def test_the_scale_of_a_heat_map_is_fixed(score: float) -> None:
    _, panel = page_panel((2, 2))
    mesh = draw_heat_map(panel, {(0.0, 512): score, (1.0, 512): score}, [0.0, 1.0], [512, 1024])
    assert mesh.get_clim() == (0, 1)
    assert mesh.get_array().mask.tolist() == [[False, True], [False, True]]
    top, bottom = panel.get_ylim()[::-1]
    assert top < bottom, "depth 0 is the beginning of the text, at the top"


def test_heat_maps_join_lengths_and_need_two_depths() -> None:
    assert heat_maps(summarise(full())) == []
    rows = []
    for length, right in ((512, 1), (1024, 2)):
        for depth, row in zip((0.0, 0.0, 1.0), policy(right, 3), strict=True):
            rows += varied([row], example={"depth_ratio": depth}, length_tokens=length)
    (found,) = heat_maps(summarise(rows))
    assert (found.title, found.depths, found.lengths) == ("needle_single_noise", [0.0, 1.0], [512, 1024])
    (entry,) = found.maps
    assert entry.label == "snapkv @ 64"
    assert entry.cells == {(0.0, 512): 0.5, (1.0, 512): 0.0, (0.0, 1024): 1.0, (1.0, 1024): 0.0}


def point(name: str, size: int, score: float, ms: float) -> CellSummary:
    """A cell with these three means."""
    row = made_row(name, 0, budget=64)
    assert row.quality is not None
    assert row.cache is not None
    assert row.timing is not None
    quality = replace(row.quality, score=score)
    cache, timing = replace(row.cache, measured_bytes=size), replace(row.timing, decode_ms_per_token=ms)
    (summary,) = summarise([replace(row, quality=quality, cache=cache, timing=timing)])
    return summary


def test_the_pareto_front_of_a_case_made_by_hand() -> None:
    """b loses to a in everything; e equals a but for its time; f is worst in all but its time; g is a's equal."""
    group = [
        point("a", 100, 0.8, 10),
        point("b", 120, 0.7, 11),
        point("c", 50, 0.5, 10),
        point("d", 200, 0.9, 10),
        point("e", 100, 0.8, 12),
        point("f", 300, 0.1, 5),
        point("g", 100, 0.8, 10),
        *summarise([without_result("h", "failed: x", "unmeasured", "why")]),
    ]
    assert [summary.cell.policy for summary in on_front(group)] == ["c", "a", "g", "d", "f"]
    _, panel = page_panel((3, 3))
    draw_front(panel, group, styles_of(group), over_time=False)
    assert sorted(text.get_text() for text in panel.texts) == ["1", "2", "3", "4", "5"]
    grey = [line for line in panel.lines if line.get_alpha() is not None]
    assert len(grey) == 2


def test_curves_differ_in_colour_and_marker_and_bytes_are_logarithmic() -> None:
    group = summarise(
        [*full(2), *(row for k in range(30) for row in [made_row(f"p{k}", i, budget=64) for i in (0, 1)])]
    )
    styles = styles_of(group)
    assert len({(style.colour, style.marker) for style in styles.values()}) == 31
    _, panel = page_panel((3, 3))
    draw_curves(panel, group, lambda measured: measured.score, styles)
    assert panel.get_xscale() == "log"
    assert panel.xaxis.get_transform().base == 2


def test_a_figure_is_the_same_text_at_any_time() -> None:
    def drawn() -> str:
        figure, panel = page_panel((3, 3))
        draw_curves(panel, summarise(full(2)), lambda measured: measured.score, styles_of(summarise(full(2))))
        return svg_of(figure, "f0")

    assert drawn() == drawn()
    assert "currentColor" in drawn()


@pytest.mark.parametrize(("floor_right", "is_drawn"), [(7, False), (4, True)])
def test_no_curve_where_the_context_is_worth_too_little(floor_right: int, is_drawn: bool, tmp_path: Path) -> None:
    floor = [made_row("no_context", i, output="7" if i < floor_right else "wrong") for i in range(8)]
    files = written([*full(), *floor, *policy(4, 8)], tmp_path)
    assert ("Bars: 95% intervals" in files["report.html"]) is is_drawn
    assert ("No curve. The full cache scores 1.00 and no context 0.88" in files["report.html"]) is not is_drawn
    assert ("the full cache is hardly better than no context" in files["report.md"]) is not is_drawn
    lines = csv_lines(files["report.csv"])
    assert [line["retained_ratio"] for line in lines] == (["1.0", "0.0", "0.0"] if is_drawn else [""] * 3)
    assert {line["floor_score"] for line in lines} == {str(floor_right / 8)}
    assert [line["on_pareto_front"] for line in lines] == ["True", "", "True"]


def test_no_context_is_a_level_and_no_point() -> None:
    floor = [made_row("no_context", i, output="wrong") for i in range(8)]
    group = summarise([*full(), *floor, *policy(4, 8)])
    _, panel = page_panel((3, 3))
    draw_curves(panel, group, lambda measured: measured.score, styles_of(group))
    assert {container.get_label() for container in panel.containers} == {"full", "snapkv"}
    assert [line.get_ydata()[0] for line in panel.lines if line.get_label() == "no_context"] == [0.0]


def test_coordinates_of_the_run_are_in_the_page(tmp_path: Path) -> None:
    run = {"sweep_sha256": "cd" * 32, "delta": 0.07, "sweep": {"budgets": [64]}}
    page = written([*full(), *policy(4, 8)], tmp_path, **run)["report.html"]
    for text in ("cd" * 32, "ab" * 32, "0.07", "haystack</dt><dd>noise", "Where it ran: place", "&#34;budgets&#34;"):
        assert text in page
