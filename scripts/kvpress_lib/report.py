"""Both halves of a run joined, and the tables that say how they compare."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

from hf_kvpolicy.eval.report import markdown_table
from hf_kvpolicy.eval.report_tables import Table
from hf_kvpolicy.eval.statistics import Difference, paired_difference

from .contenders import Contender, call
from .rows import overlap

_MIB = 2**20
RESULT_COLUMNS = (
    "pair", "n", "score: ours / theirs", "ours - theirs [95%]", "answer NLL: ours / theirs", "NLL, ours - theirs [95%]",
    "equal answers", "rows in common", "heads alike", "MiB freed: ours (K/V alone) / theirs",
)  # fmt: skip


def cell_of(
    contender: Contender,
    ours: Mapping[str, Mapping[str, Any]],
    theirs: Mapping[str, Mapping[str, Any]],
    dense_bytes: Mapping[str, int],
) -> dict[str, Any]:
    """One pair's part of the record: what was asked of both, and every example beside the other side's.

    Args:
        contender: the pair.
        ours: our trials by example; theirs: the peer's.
        dense_bytes: K/V of each example's whole context.
    """
    examples = []
    for name, mine in ours.items():
        other = theirs[name]
        shown = ("score", "answer_nll", "output", "held_bytes")
        examples.append(
            {
                "id": name,
                "ours": {key: mine[key] for key in (*shown, "payload_bytes")},
                "theirs": {key: other[key] for key in shown},
                "dense_bytes": dense_bytes[name],
                "equal_answers": mine["answer_ids"] == other["answer_ids"],
                "rows": asdict(overlap(mine["kept_LHN"], other["kept_LHN"])),
            }
        )
    return {
        "pair": contender.key,
        "rows": contender.rows,
        "ours": call(contender.policy, contender.options),
        "theirs": "no press" if contender.press is None else f"`{contender.press}`",
        "differences": contender.differences,
        "examples": examples,
    }


def result_table(cells: Iterable[Mapping[str, Any]]) -> Table:
    """A line a pair: scores, likelihoods, what is kept and what is freed right after the context."""
    return Table(columns=RESULT_COLUMNS, rows=[_result_row(cell) for cell in cells])


def options_table(cells: Iterable[Mapping[str, Any]]) -> Table:
    """What each side was asked for, and what no option makes alike."""
    pairs: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        pairs.setdefault((cell["ours"], cell["theirs"], cell["differences"]), []).append(cell["pair"])
    rows = [[", ".join(names), f"`{ours}`", theirs, found] for (ours, theirs, found), names in pairs.items()]
    return Table(columns=("pair", "ours", "kvpress", "differences"), rows=rows)


def report_lines(cells: list[dict[str, Any]]) -> list[str]:
    """Both tables in Markdown."""
    return [*markdown_table(result_table(cells)), "", *markdown_table(options_table(cells))]


def _result_row(cell: Mapping[str, Any]) -> list[str]:
    examples = cell["examples"]
    totals = {key: sum(e["rows"][key] for e in examples) for key in examples[0]["rows"]}
    theirs_rows = totals["shared_rows"] + totals["only_theirs_rows"]
    ours_mib, rows_mib, theirs_mib = (
        fmean(e["dense_bytes"] - e[side][held] for e in examples) / _MIB
        for side, held in (("ours", "held_bytes"), ("ours", "payload_bytes"), ("theirs", "held_bytes"))
    )
    return [
        cell["pair"],
        f"{len(examples)} smoke",
        _means(examples, "score"),
        _paired(examples, "score"),
        _means(examples, "answer_nll"),
        _paired(examples, "answer_nll"),
        f"{sum(e['equal_answers'] for e in examples)} of {len(examples)}",
        # Not rounded up to one: 0.9999 is not all of it.
        f"{int(totals['shared_rows'] * 10_000 / theirs_rows) / 10_000:.4f}",
        f"{totals['heads_alike']} of {totals['heads']}",
        f"{ours_mib:.2f} ({rows_mib:.2f}) / {theirs_mib:.2f}",
    ]


def _means(examples: list[Mapping[str, Any]], name: str) -> str:
    return " / ".join(f"{fmean(e[side][name] for e in examples):.2f}" for side in ("ours", "theirs"))


def _paired(examples: list[Mapping[str, Any]], name: str) -> str:
    ours, theirs = ({e["id"]: e[side][name] for e in examples} for side in ("ours", "theirs"))
    found = paired_difference(ours, theirs)
    assert isinstance(found, Difference), "both sides have the same examples"
    # Rounding leaves no minus in front of a zero.
    mean, low, high = (f"{round(value, 2) + 0.0:.2f}" for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"
