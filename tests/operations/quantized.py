"""Plain models of caches whose older rows are coded in few bits: now and then, and for good."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oracle import Oracle
from pruned import PrunedOracle


def coded_rows(cache: Any) -> int:
    """Check that no residual is over its limit, and return whether any row is coded."""
    snapshot, block = cache._runtime.snapshot, cache.composition.representation.block_rows
    if snapshot.open_segment is None and cache._runtime.waiting is None:
        pinned = len(cache.composition.pinned_tokens) if cache.composition.positions == "cache_local" else 0
        for rows in snapshot.rows:
            assert snapshot.width - pinned - rows.coded_slots < 2 * block, "a full residual is coded at once"
        for layer in snapshot.ragged:
            blocks = getattr(layer.rows, "blocks", None)
            coded = [0] * len(layer.map.lengths) if blocks is None else blocks.slots
            for slots, length in zip(coded, layer.map.lengths, strict=True):
                assert length + snapshot.tail_width - slots < 3 * block, "a full residual is coded at once"
    stores = [*snapshot.rows, *(layer.rows for layer in snapshot.ragged)]
    return sum(rows.coded_slots for rows in stores)


@dataclass
class QuantizedOracle(Oracle):
    """Counts rows as ever. What was fed before rows are coded cannot be taken back; when they are is read off."""

    def check(self, cache: Any) -> None:
        if coded_rows(cache) and cache._runtime.snapshot.evicted_at_column == self.columns:
            self.evicted_at = self.columns
        super().check(cache)


@dataclass
class QuantizedPrunedOracle(PrunedOracle):
    """Likewise, of a policy that drops tokens between layers and rows of answers in blocks."""

    def check(self, cache: Any) -> None:
        if coded_rows(cache) and cache._runtime.snapshot.evicted_at_column == self.columns:
            self.evicted_at = self.columns
        super().check(cache)
