"""A plain model of a cache whose older rows are coded in few bits: now and then, and for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oracle import Oracle


@dataclass
class QuantizedOracle(Oracle):
    """Counts rows as ever. What was fed before rows are coded cannot be taken back; when they are is read off."""

    def check(self, cache: Any) -> None:
        snapshot, rule = cache._runtime.snapshot, cache.composition.representation
        stores = [*snapshot.rows, *(layer.rows for layer in snapshot.ragged)]
        coded = stores[0].coded_slots if stores else 0
        assert coded % rule.block_rows == 0
        if self.waiting is None and not self.is_open and snapshot.rows:
            pinned = len(cache.composition.pinned_tokens) if cache.composition.positions == "cache_local" else 0
            assert snapshot.width - pinned - coded < 2 * rule.block_rows, "a full residual is coded at once"
        if coded and snapshot.evicted_at_column == self.columns:
            self.evicted_at = self.columns
        super().check(cache)
