"""How to read a report: what holds of every run, and what the rows of this one say of their prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .answer_room import answer_room_notes
from .records import Row
from .report_tables import BYTES_NOTE
from .results import Result, delta_of
from .statistics import SMOKE_BELOW

__all__ = ["cut_prompts", "reading_notes"]


def reading_notes(run: Mapping[str, Any], results: Sequence[Result]) -> list[str]:
    """One sentence or a few for each thing to know, in plain text."""
    delta = delta_of(run)
    return [
        "Score: the mean of the task's measure over the greedy outputs. NLL: nats per token of the gold answer, fed "
        "token by token. KL to full: nats per token of the gold answer between the full cache's distribution and this "
        "one's; top-1: how often both prefer the same token. Empty where the records are older than the measure.",
        "Intervals, 95%, over examples: Wilson's for right-or-wrong scores and Tango's for their paired differences; "
        "a BCa bootstrap for graded scores and for NLL.",
        "Outcome: the score minus the full cache's, example by example. degraded: the whole interval lies below "
        f"-{delta:g}; valid: above it, at {SMOKE_BELOW} examples or more; otherwise the examples are too few to say. "
        "Where nothing is generated, the negative NLL in nats per token takes the place of the score. "
        "equals-full: the budget takes nothing from any prompt, so nothing was run. not interpretable: unmeasured, "
        "because the full cache fails too or is not there; report.csv has interpretable False.",
        "Paired differences: this policy minus the other on the same prompts at the same budget. At one budget bytes "
        "may differ by the maps that a policy keeps: `kvpolicy eval compare` refuses pairs more than 2% apart. By "
        "depth: score / NLL of the examples whose needle lies there; 0 is the beginning of the text.",
        f"smoke: fewer than {SMOKE_BELOW} examples; shows that things run, supports no claim.",
        "Rows are per layer and head; rows and MiB are what the cache held right after the prompt. Rows over time: the "
        "mean over the forwards, of the prompt and of every token of the answer but the last.",
        *_matched_note(results),
        *answer_room_notes(row for result in results for row in result.rows),
        f"{_question_note(results)} {_cut_note(results)}",
        BYTES_NOTE,
        "Times are wall-clock; on a shared machine an indication only.",
    ]


def _matched_note(results: Iterable[Result]) -> list[str]:
    if not any(result.summary.cell.matched_to for result in results):
        return []
    return [
        "@ rows of another cell: the budget is, example by example, the rows that cell held over time. Its paired "
        "differences are with these cells."
    ]


def cut_prompts(rows: Iterable[Row]) -> tuple[int, int, int]:
    """Of the prompts of these rows: how many there are, how many say whether they were cut, and how many were.

    A prompt is an example of a task at a length and seed, with or without its question; many rows share one.
    """
    prompts = {
        (*(row.cell[key] for key in ("task", "length_tokens", "seed", "query_aware")), str(row.example["id"])): row
        for row in rows
    }
    known = [row.example["truncated"] for row in prompts.values() if "truncated" in row.example]
    return len(prompts), len(known), sum(map(bool, known))


def _question_note(results: Iterable[Result]) -> str:
    seen = {result.summary.cell.query_aware for result in results}
    if seen == {True}:
        return "Every prompt carried its question when rows were selected: selection is question-aware."
    unseen = "rows were selected from the text alone, and the question was fed afterwards."
    return f"Question unseen: {unseen}" + (" Elsewhere the question was in the prompt." if True in seen else "")


def _cut_note(results: Iterable[Result]) -> str:
    count, known, cut = cut_prompts(row for result in results for row in result.rows)
    missing = f" Of {count - known} more it is not recorded." if known else ""
    if not known:
        return f"Whether any of the {count} prompts was cut is not recorded."
    found = f"{cut} of {known} prompts were cut to fit their length." if cut else f"None of {known} prompts was cut."
    return found + (missing if known < count else "")
