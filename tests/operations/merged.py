"""Plain models of caches whose policies merge: layers, or consecutive tokens. Nothing that is fed is ever lost."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oracle import Oracle


@dataclass
class MergedOracle(Oracle):
    """The first tokens of a batch row fix which of its rows are merged; nothing before their end comes back."""

    fixed: list[bool] = field(default_factory=list)
    merges_none: bool = False

    def _take(self, new: list[list[int]]) -> None:
        super()._take(new)
        before = self.fixed or [False] * len(new)
        self.fixed = [old or any(row) for old, row in zip(before, new, strict=True)]
        if self.fixed != before and not self.merges_none:
            self.evicted_at = self.columns

    def batch(self, index: list[int]) -> None:
        super().batch(index)
        self.fixed = [self.fixed[i] for i in index] if self.fixed else []

    def crop(self, removed: int) -> None:
        super().crop(removed)
        self.fixed = self.fixed if self.columns else []

    def reset(self) -> None:
        super().reset()
        self.fixed = []


@dataclass
class SegmentsOracle(Oracle):
    """Every token is in one row of every owner, rows that are closed stay, and no accepted token comes back."""

    closed: dict[tuple[int, int, int], list[int]] = field(default_factory=dict)

    def _take(self, new: list[list[int]]) -> None:
        super()._take(new)
        if any(map(any, new)):
            self.evicted_at = self.columns

    def batch(self, index: list[int]) -> None:
        super().batch(index)
        self.closed = {
            (layer, to, head): ends
            for to, row in enumerate(index)
            for (layer, was, head), ends in self.closed.items()
            if was == row
        }

    def reset(self) -> None:
        super().reset()
        self.closed = {}

    def _check_rows(self, cache: Any) -> None:
        if not self.mask:
            self.closed = {}
        for layer in range(cache.num_layers):
            for row, fed in enumerate(self.tokens):
                for head, spans in enumerate(cache.source_spans(layer, row)):
                    ends = [last for _, last in spans.tolist()]
                    behind = [token for first, last in spans.tolist() for token in range(first, last + 1)]
                    assert behind == list(range(fed))
                    assert ends == cache.positions(layer, row)[head].tolist()
                    before = self.closed.get((layer, row, head), [])
                    assert ends[: len(before)] == before, "a closed segment stays as it is"
                    self.closed[layer, row, head] = ends[:-1]
        self._check_evicted(cache._runtime.snapshot.evicted_at_column)
