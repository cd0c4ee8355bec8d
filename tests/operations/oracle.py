"""A plain model of one cache's life: how far it was fed, what waits, and how many rows each owner must hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from hf_kvpolicy.allocation import UNIFORM

MAX_HELD_BACK = 64
NO_LIMIT = 10**9


@dataclass
class Waiting:
    new: list[list[int]]  # per batch row, 1 for each real column
    is_first: bool

    @property
    def length(self) -> int:
        return len(self.new[0])


@dataclass
class Oracle:
    """Counts only; which rows stay is another test's matter."""

    schedule: str
    minimum_rows: int
    budget: int | float | None
    hold: bool = False
    append: bool = False
    carries: bool = False
    drop_ratio: float = 0.0
    # Owners keep as many rows as their own policy does: counts are upper limits.
    by_family: bool = False
    mask: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    rows: list[int] | None = None
    waiting: Waiting | None = None
    recording: bool = False
    recorded_any: bool = False
    is_open: bool = False
    open_start: int = 0
    evicted_at: int = 0
    decided: bool = False
    # Whether the operation must have dropped a row; and per batch row the committed tokens that each owner had lost
    # when it was last looked at.
    drops: bool = False
    lost: list[list[set[int]]] = field(default_factory=list)

    @classmethod
    def of(cls, cache: Any) -> Oracle:
        policy = cache.composition
        budget = None if policy.budget is None else policy.budget.declared
        if isinstance(budget, str):
            raise ValueError("byte budgets are given to the oracle as rows")
        return cls(
            schedule=policy.schedule,
            minimum_rows=policy.minimum_rows,
            budget=budget,
            hold=policy.chunked_prefill == "hold",
            append=policy.on_append == "append",
            carries=policy.carries_scores,
            drop_ratio=policy.drop_ratio or 0.0,
            by_family=policy.families is not None,
        )

    def refuses(self) -> bool:
        """Whether the next forward must be refused."""
        return False

    @property
    def columns(self) -> int:
        return len(self.mask[0]) if self.mask else 0

    @property
    def fed(self) -> int:
        return self.columns + (0 if self.waiting is None else self.waiting.length)

    @property
    def tokens(self) -> list[int]:
        return [sum(row) for row in self.mask]

    @property
    def full_mask(self) -> list[list[int]]:
        waiting = self.waiting
        if waiting is None:
            return [list(row) for row in self.mask]
        old = self.mask or [[] for _ in waiting.new]
        return [a + b for a, b in zip(old, waiting.new, strict=True)]

    def feed(self, new: list[list[int]]) -> None:
        self.accept(0, by_crop=False)
        length = len(new[0])
        if self.is_open and length == 1:
            self.finish()
        if self.recording:
            self.waiting = Waiting(new, is_first=length > 1 and not self.recorded_any)
            self.recorded_any = self.recorded_any or length > 1
            return
        first = self.columns
        self._take(new)
        if self.schedule == "never":
            return
        brought = [any(row) for row in new]
        if self.hold and (self.carries or self.schedule == "every_step") and (length > 1 or not first):
            self._hold_if(length, first)
            return
        if self.schedule == "end_of_prefill":
            if (length == 1 and first) or (self.append and self.decided):
                self._hold_if(length, first)
                return
            if self.hold:
                self._hold_if(length, first)
                return
        self._select(brought)

    def _hold_if(self, length: int, first: int) -> None:
        opens = length > 1 or (self.by_family and not first)
        if opens and self.hold and self._selects() and not self.is_open:
            self.is_open, self.open_start = True, first

    def _take(self, new: list[list[int]]) -> None:
        self.mask = [a + b for a, b in zip(self.mask or [[] for _ in new], new, strict=True)]
        old = self.counts or [0] * len(new)
        self.counts = [count + sum(row) for count, row in zip(old, new, strict=True)]

    def _selects(self) -> bool:
        held = self.hold and self.schedule == "every_step"
        return self.carries or held or (self.schedule == "end_of_prefill" and not (self.append and self.decided))

    def _select(self, brought: list[bool]) -> None:
        """Cut every batch row to its budget but those without a token in what ends here."""
        if self.rows is None:
            if isinstance(self.budget, float):
                self.rows = [max(self.minimum_rows, int(self.budget * n)) for n in self.tokens]
            else:
                self.rows = [NO_LIMIT if self.budget is None else int(self.budget)] * len(self.mask)
        each = zip(self.counts, self.rows, brought, strict=True)
        kept = [self._kept(count, rows) if own else count for count, rows, own in each]
        if kept != self.counts and not self.by_family:
            self.evicted_at, self.drops = self.columns, True
        self.counts, self.is_open, self.decided = kept, False, True

    def _kept(self, count: int, rows: int) -> int:
        return count if count <= rows else count - max(int(self.drop_ratio * rows), count - rows)

    def finish(self) -> None:
        if self.is_open:
            self.is_open = False
            if self._selects():
                self._select(self._brought())

    def _brought(self) -> list[bool]:
        return [any(row[self.open_start :]) for row in self.mask]

    def accept(self, rejected: int, *, by_crop: bool) -> None:
        waiting, self.waiting = self.waiting, None
        if waiting is None or rejected >= waiting.length:
            return
        first = self.columns
        # What was accepted decides; the first token ever is a prompt.
        is_prompt = (waiting.length - rejected > 1 or not first) and (waiting.is_first or not by_crop)
        if not is_prompt:
            self.finish()  # decode tokens end a held prompt
        accepted = [row[: len(row) - rejected] for row in waiting.new]
        brought = self._brought() if self.is_open else [False] * len(accepted)
        self._take(accepted)
        brought = [old or any(new) for old, new in zip(brought or [False] * len(accepted), accepted, strict=True)]
        if is_prompt and self._selects() and self.hold and not by_crop:
            if not self.is_open and (waiting.length > 1 or self.by_family):
                self.is_open, self.open_start = True, first
        elif self.schedule in ("every_step", "when_full") or (is_prompt and self._selects()):
            self._select(brought)

    def can_crop(self, removed: int) -> bool:
        waiting = 0 if self.waiting is None else self.waiting.length
        left = self.columns - (removed - waiting)
        if self.carries and removed > waiting and left:
            return False
        return removed <= waiting or self.columns - (removed - waiting) >= self.evicted_at

    def crop(self, removed: int) -> None:
        waiting = 0 if self.waiting is None else self.waiting.length
        if waiting and removed <= waiting:
            self.accept(removed, by_crop=True)
            return
        if removed > waiting:
            self.waiting = None
            beyond = removed - waiting
            lost = [sum(row[len(row) - beyond :]) for row in self.mask]
            self.mask = [row[: len(row) - beyond] for row in self.mask]
            self.counts = [a - b for a, b in zip(self.counts, lost, strict=True)]
            if self.is_open and self.columns <= self.open_start:
                self.is_open = False
            if not self.columns:
                self.mask, self.counts, self.rows, self.evicted_at, self.decided = [], [], None, 0, False
                self.lost = []

    def batch(self, index: list[int]) -> None:
        self.mask = [list(self.mask[i]) for i in index] if self.mask else []
        self.counts = [self.counts[i] for i in index] if self.counts else []
        self.lost = [list(self.lost[i]) for i in index] if self.lost else []
        if self.rows is not None:
            self.rows = [self.rows[i] for i in index]
        if self.waiting is not None:
            self.waiting = Waiting([list(self.waiting.new[i]) for i in index], self.waiting.is_first)

    def record(self, on: bool) -> None:
        if on and not self.recording:
            self.recorded_any = False
        if not on:
            self.accept(0, by_crop=False)
        self.recording = on

    def reset(self) -> None:
        self.mask, self.counts, self.rows, self.waiting, self.lost = [], [], None, None, []
        self.recording = self.recorded_any = self.is_open = self.decided = False
        self.evicted_at = 0

    def check(self, cache: Any) -> None:
        """Compare a cache with this model of it."""
        cache.check_integrity()
        assert cache.get_seq_length() == self.fed
        assert cache._runtime.snapshot.frontier.columns == self.columns
        assert (cache._runtime.waiting is not None) == (self.waiting is not None)
        assert cache.is_recording_past() == self.recording
        assert (cache._runtime.snapshot.open_segment is not None) == self.is_open
        if self.columns:
            self._check_rows(cache)

    def _check_rows(self, cache: Any) -> None:
        """Compare what is stored of the committed tokens."""
        storing = self.storing(cache)
        stored = torch.stack([cache.stored_rows(layer) for layer in storing])
        layers, _, heads = stored.shape
        if self.by_family:
            assert (stored <= torch.tensor(self.counts)[:, None]).all(), "a cap, where heads keep what they need"
        else:
            # Budgets may differ by owner; their total never does.
            assert stored.sum(dim=(0, 2)).tolist() == [count * layers * heads for count in self.counts]
        if not self.by_family and cache.composition.allocation is UNIFORM:
            assert stored.tolist() == [[[count] * heads for count in self.counts]] * layers
        lost: list[list[set[int]]] = [[] for _ in self.counts]
        for index, layer in enumerate(storing):
            for row, fed in enumerate(self.tokens):
                for head, tokens in enumerate(cache.positions(layer, row)):
                    assert len(tokens) == int(stored[index, row, head])
                    assert tokens.tolist() == sorted(set(tokens.tolist()))
                    lost[row].append(set(range(fed)) - set(tokens.tolist()))
                    assert len(lost[row][-1]) == fed - len(tokens), "every row is a committed token's"
        self._note_losses(lost)
        self._check_evicted(cache._runtime.snapshot.evicted_at_column)

    def storing(self, cache: Any) -> list[int]:
        """Return the layers that have rows of their own."""
        return list(range(cache.num_layers))

    def _note_losses(self, lost: list[list[set[int]]]) -> None:
        """Compare what owners lost in this operation with what counts said; families say nothing, and are believed.

        A row once lost is lost for good. For families it only matters whether there was a loss, not at which column:
        their rows carry scores, so that accepted tokens are taken back all at once or not at all.
        """
        before = self.lost or [[set() for _ in owners] for owners in lost]
        # Tokens that were taken back are no loss any more.
        before = [[own & set(range(n)) for own in owners] for owners, n in zip(before, self.tokens, strict=True)]
        pairs = [pair for old, new in zip(before, lost, strict=True) for pair in zip(old, new, strict=True)]
        assert all(old <= new for old, new in pairs), "a row that was dropped came back"
        dropped = any(new - old for old, new in pairs)
        if self.by_family:
            self.evicted_at = self.columns if dropped else self.evicted_at
        else:
            assert dropped == self.drops, "rows leave when counts say so, and only then"
        self.lost, self.drops = lost, False

    def _check_evicted(self, column: int) -> None:
        """Compare the column before which nothing can be taken back."""
        assert column == self.evicted_at or (self.by_family and column and self.evicted_at)
