"""Whether a task generates as many tokens as its answers take; with fewer, a right answer cannot be seen."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .records import Row

__all__ = ["answer_room_note", "answer_room_notes"]

# Measures of answers with several parts, each of which has to be there.
_OF_PARTS = ("needle_match", "string_match_all")


def answer_room_note(
    title: str, *, answer_tokens: Iterable[int], values: Iterable[Sequence[str]], metric: str, max_new_tokens: int
) -> str | None:
    """What is to be known of a task point whose answers are longer than what is generated; None where they are not.

    Args:
        title: the task point for people.
        answer_tokens: tokens of the gold answers.
        values: the accepted answers, or the parts of one, of every example.
        metric: how answers are scored.
        max_new_tokens: tokens that are generated; 0 for a task that generates nothing.
    """
    longest = max(answer_tokens, default=0)
    if not max_new_tokens or longest <= max_new_tokens:
        return None
    parts = max(map(len, values), default=1) if metric in _OF_PARTS else 1
    what = f"answers of {parts} values take" if parts > 1 else "answers take"
    return (
        f"{title}: {what} up to {longest} tokens, and max_new_tokens is {max_new_tokens}. A score of 1 may be out of "
        "reach, of the full cache too."
    )


def answer_room_notes(rows: Iterable[Row]) -> list[str]:
    """The notes of all task points of a run, from its rows."""
    points: dict[tuple[str, int, int], list[Row]] = {}
    for row in rows:
        if row.quality is not None:
            key = (row.cell["task"], row.cell["length_tokens"], row.cell["max_new_tokens"])
            points.setdefault(key, []).append(row)
    found = [
        answer_room_note(
            f"{task} {length} tokens",
            answer_tokens=[row.quality.answer_tokens for row in group if row.quality is not None],
            values=[row.example.get("answers", ()) for row in group],
            metric=str(group[0].example.get("metric")),
            max_new_tokens=max_new_tokens,
        )
        for (task, length, max_new_tokens), group in points.items()
    ]
    return [note for note in found if note is not None]
