"""What readers of a cache follow, and what it has done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .placement import OFFLOAD_DEVICE, Moves
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

    @property
    def newest(self) -> Snapshot:
        """What waits, or what is published where nothing does."""
        return self.snapshot if self.waiting is None else self.waiting.snapshot

    def each(self, act: Callable[[Snapshot], Snapshot]) -> Visible:
        """Return both with an action on their snapshots."""
        waiting = self.waiting
        waiting = None if waiting is None else replace(waiting, snapshot=act(waiting.snapshot))
        return Visible(act(self.snapshot), waiting)

    @property
    def is_offloaded(self) -> bool:
        """Whether a part of either is away from its device."""
        waiting = self.waiting
        return self.snapshot.home is not None or (waiting is not None and waiting.snapshot.home is not None)

    def offloaded(self, layer: int | None) -> Visible:
        """Return both with a layer, or all for None, on the CPU."""
        move = Moves()
        return self.each(lambda snapshot: snapshot.offloaded(layer, OFFLOAD_DEVICE, move))

    def brought_back(self, layer: int | None) -> Visible:
        """Return both with a layer, or all for None, where it was before."""
        move = Moves()
        return self.each(lambda snapshot: snapshot.brought_back(layer, move))

    def copied(self) -> Visible:
        """Return both with buffers of their own, which they share where these do; maps never change."""
        copies: dict[int, Any] = {}

        def copy(rows: Any, store: int) -> Any:
            if id(rows) not in copies:
                copies[id(rows)] = rows.copied()
            return copies[id(rows)]

        return self.each(lambda snapshot: snapshot.each_buffer(copy))
