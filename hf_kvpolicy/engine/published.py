"""What readers of a cache follow, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass

from .snapshot import Snapshot

__all__ = ["RunStatistics", "Visible", "Waiting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatistics:
    """What a cache has done since it was made or reset."""

    forwards: int = 0
    publications: int = 0
    # Publications that dropped at least one row.
    selections: int = 0
    # Row instances (over layers, owners and batch rows) dropped so far.
    rows_dropped: int = 0
    # Highest bytes alive at once in any forward: published, unpublished and workspace.
    transient_peak_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Waiting:
    """A finished forward whose tokens are not accepted yet."""

    snapshot: Snapshot
    length: int
    # First multi-token forward since recording began: a prompt segment however it is accepted.
    is_first: bool


@dataclass(frozen=True, slots=True, eq=False)
class Visible:
    """What readers follow. One assignment replaces both, so an interrupt cannot part them."""

    snapshot: Snapshot
    waiting: Waiting | None = None
