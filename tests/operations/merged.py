"""A plain model of a cache whose policy merges layers: no row ever leaves, but prompts cannot be taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

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
