"""A plain model of a cache of condensed layers: no row ever leaves, and some layers store none of their own."""

from __future__ import annotations

from typing import Any

import torch
from oracle import Oracle


class CondensedOracle(Oracle):
    """Readers show their producer's rows and have none."""

    def storing(self, cache: Any) -> list[int]:
        producers = cache.composition.representation.producers
        for layer, producer in enumerate(producers):
            for row in range(len(self.counts)):
                pairs = zip(cache.positions(layer, row), cache.positions(producer, row), strict=True)
                assert all(torch.equal(mine, theirs) for mine, theirs in pairs)
            if layer != producer:
                assert not cache.stored_rows(layer).any()
        return sorted(set(producers))
