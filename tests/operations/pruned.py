"""A plain model of a cache whose policy prunes prompts between layers and drops rows of answers in blocks."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import cos, pi
from typing import Any

import torch
from oracle import Oracle
from reference.pyramidinfer import planned


@dataclass
class PrunedOracle(Oracle):
    """Counts by layer: exact for a first prompt and for answers; for what a later prompt leaves, upper limits."""

    layers: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    # Rows by batch row and layer, and per batch row how many tokens a prompt or a block decided on.
    held: list[list[int]] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    # Whether scores are held: a decode token came since the last prompt.
    scored: bool = False
    # The held rows are upper limits until the cache was looked at: which of old and new tokens stay decides how many
    # tokens reach a layer.
    unknown: bool = False

    @classmethod
    def of(cls, cache: Any) -> PrunedOracle:
        policy = cache.composition
        return cls(
            schedule=policy.schedule,
            minimum_rows=policy.minimum_rows,
            budget=None if policy.budget is None else policy.budget.declared,
            append=policy.on_append == "append",
            layers=cache.num_layers,
            options=dict(policy.options),
        )

    def refuses(self) -> bool:
        """No token may wait for acceptance."""
        return self.recording

    def feed(self, new: list[list[int]]) -> None:
        first, counts = self.columns, [sum(row) for row in new]
        self.mask = [a + b for a, b in zip(self.mask or [[] for _ in new], new, strict=True)]
        self.held = self.held or [[0] * self.layers for _ in new]
        self.settled = self.settled or [0] * len(new)
        if first and len(new[0]) == 1:
            self._decode(counts)
        elif self.append and self.decided:
            held = [[rows + count for rows in held] for held, count in zip(self.held, counts, strict=True)]
            self._settle(held, counts)
        else:
            self._prune(counts, is_first=not first)

    def _settle(self, held: list[list[int]], counts: list[int]) -> None:
        """Settle the answers of those who brought a token."""
        self.held, self.scored = held, self.scored and not all(counts)
        self.settled = [now if n else old for now, old, n in zip(self.tokens, self.settled, counts, strict=True)]

    def _recent(self, rows: int) -> int:
        return min(rows, 1 + int(rows * self.options["recent_ratio"]))

    def _pinned(self, first: int, stop: int) -> int:
        return sum(first <= token < stop for token in {*range(self.options["sinks"]), *self.options["protect"]})

    def _prune(self, counts: list[int], *, is_first: bool) -> None:
        if self.rows is None and self.budget is not None:
            rows = [max(self.minimum_rows, int(self.budget * n)) for n in self.tokens]
            self.rows = rows if isinstance(self.budget, float) else [int(self.budget)] * len(counts)
        pruned, drops = [], False
        for row, (held, new) in enumerate(zip(self.held, counts, strict=True)):
            if not new:
                pruned.append(held)
                continue
            budget = None if self.rows is None else self.rows[row]
            recent = self._recent(new if budget is None else min(new, budget))
            if budget is not None and recent:
                recent = max(1, min(recent, budget - self._pinned(0, 10**9)))
            names = ("decay", "min_context", "interval")
            kept = planned(
                held, new - recent, pinned=self._pinned(0, self.tokens[row] - recent),
                mean_rows=None if budget is None else budget - recent, **{name: self.options[name] for name in names},
            )  # fmt: skip
            drops = drops or sum(kept) < sum(held) + self.layers * (new - recent)
            reach, left = new - recent, []
            for old, rows in zip(held, kept, strict=True):
                rows = min(rows, old + reach)
                left.append(recent + rows)
                reach = min(reach, rows)
            pruned.append(left)
        self._settle(pruned, counts)
        self.unknown, self.decided = not is_first, True
        self.evicted_at = self.columns if drops else self.evicted_at

    def _decode(self, counts: list[int]) -> None:
        block, self.scored = self.options["decode_block"], True
        for row, new in enumerate(counts):
            held = self.held[row] = [rows + new for rows in self.held[row]]
            if not new or self.tokens[row] - self.settled[row] < self._recent(held[0]) + block:
                continue
            pinned = self._pinned(self.settled[row], self.settled[row] + block)
            decay, ratio = self.options["decode_decay"], self.options["decode_ratio"]
            shares = [ratio * ((1 - decay) * (cos(pi * n / self.layers) + 1) / 2 + decay) for n in range(self.layers)]
            kept = [max(1, int(block * share), pinned) for share in shares]
            self.held[row] = [rows - block + stay for rows, stay in zip(held, kept, strict=True)]
            self.settled[row] += block
            self.evicted_at = self.columns if sum(kept) < block * self.layers else self.evicted_at

    def _left(self, removed: int) -> list[int]:
        return [sum(row[: len(row) - removed]) for row in self.mask]

    def can_crop(self, removed: int) -> bool:
        left = self.columns - removed
        if left < self.evicted_at:
            return False
        answers = any(n > settled for n, settled in zip(self._left(removed), self.settled, strict=True))
        return not (self.scored and answers and 0 < left < self.columns)

    def crop(self, removed: int) -> None:
        if not removed:
            return
        tokens, left = self.tokens, self._left(removed)
        self.mask = [row[: len(row) - removed] for row in self.mask]
        lost = [a - b for a, b in zip(tokens, left, strict=True)]
        self.held = [[rows - gone for rows in held] for held, gone in zip(self.held, lost, strict=True)]
        self.settled, self.scored = [min(pair) for pair in zip(self.settled, left, strict=True)], False
        if not self.columns:
            self._forget()

    def batch(self, index: list[int]) -> None:
        super().batch(index)
        self.held, self.settled = [list(self.held[i]) for i in index], [self.settled[i] for i in index]

    def reset(self) -> None:
        super().reset()
        self._forget()

    def _forget(self) -> None:
        self.mask, self.held, self.settled, self.rows = [], [], [], None
        self.scored, self.decided, self.evicted_at = False, False, 0

    def check(self, cache: Any) -> None:
        cache.check_integrity()
        snapshot = cache._runtime.snapshot
        assert cache.get_seq_length() == snapshot.frontier.columns == self.columns
        assert cache._runtime.waiting is None
        assert cache.is_recording_past() == self.recording
        assert snapshot.evicted_at_column == self.evicted_at
        if not self.columns:
            return
        assert (snapshot.scores_LBSWX is not None) == self.scored
        stored = torch.stack([cache.stored_rows(layer) for layer in range(self.layers)])
        assert (stored == stored[:, :, :1]).all(), "heads of a layer share one set"
        found = stored[:, :, 0].T.tolist()
        if self.unknown:
            assert (torch.tensor(found) <= torch.tensor(self.held)).all()
            self.held, self.unknown = found, False
        assert found == self.held
        pinned = {*range(self.options["sinks"]), *self.options["protect"]}
        for row, (fed, settled) in enumerate(zip(self.tokens, self.settled, strict=True)):
            for layer in range(self.layers):
                tokens = cache.positions(layer, row)[0].tolist()
                assert tokens == sorted(set(tokens))
                assert set(tokens) >= {*(token for token in pinned if token < fed), *range(settled, fed)}
