"""A folder that is continued with another sweep: what is new in it, and what only its reports still hold."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

__all__ = ["changed_sweep_note"]

# The model is told by its digests, and a folder may be moved; threads and jobs are part of the environment.
_TOLD_ELSEWHERE = ("model", "threads", "jobs")


def changed_sweep_note(
    before: Mapping[str, Any] | None, now: Mapping[str, Any], *, found: Set[str], asked: Set[str]
) -> str | None:
    """What a folder gets that was begun with another sweep; None where the sweep is the same, or the folder new.

    Args:
        before: the sweep's mapping in the folder's record, if there is one.
        now: this sweep's.
        found: keys of the cells in the folder.
        asked: keys of this sweep's cells.
    """
    if before is None:
        return None
    keys = [key for key in {**before, **now} if key not in _TOLD_ELSEWHERE and before.get(key) != now.get(key)]
    if not keys:
        return None
    old, note = len(found - asked), f"This folder was begun with another sweep; {', '.join(sorted(keys))} changed."
    note += f" {len(asked - found)} of its {len(asked)} cells are new here."
    return f"{note} {old} cells that it does not ask for stay in the folder and in its reports." if old else note
