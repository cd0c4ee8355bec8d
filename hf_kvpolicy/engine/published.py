"""What readers of a cache follow, and what it has done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    # Highest bytes alive at once in any forward, and as its tokens are accepted: published, unpublished and workspace.
    transient_peak_bytes: int = 0

    def published(self, dropped: int, alive: Sequence[Snapshot] = ()) -> RunStatistics:
        """Return them after one more publication that dropped so many rows, in which these snapshots were alive."""
        return replace(
            self,
            publications=self.publications + 1,
            selections=self.selections + (dropped > 0),
            rows_dropped=self.rows_dropped + dropped,
            transient_peak_bytes=max(self.transient_peak_bytes, _bytes_of(alive)),
        )


def _bytes_of(alive: Sequence[Snapshot]) -> int:
    """Return the bytes of all their buffers, and of the largest copy that reading a layer of them makes."""
    tensors = {id(t): t.nbytes for each in alive for rows in each.buffers for t in rows.tensors()}
    read_bytes = max((rows.view_bytes(each.width) for each in alive for rows in each.rows), default=0)
    return sum(tensors.values()) + read_bytes


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
    def snapshots(self) -> tuple[Snapshot, ...]:
        """What is published, and what waits if anything does."""
        return (self.snapshot,) if self.waiting is None else (self.snapshot, self.waiting.snapshot)

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
