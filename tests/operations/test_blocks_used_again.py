"""Blocks of quantized rows that are used again: random deaths against a plain list of what every owner holds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_kvpolicy.contract import Generations
from hf_kvpolicy.engine import Frontier, Snapshot
from hf_kvpolicy.engine.coded_again import renewed
from hf_kvpolicy.representation.quantized import QuantizedRows
from hf_kvpolicy.storage import DenseRows, RowMap
from hf_kvpolicy.storage.coded import CodedRows

LAYERS, BATCH, HEADS, DIM = 2, 2, 2, 6


@dataclass
class Row:
    """What one owner's row was, and what is known of how it is held."""

    keys: Tensor
    values: Tensor
    state: float
    # Upper bounds of how far what is read may be off, and how often it was coded.
    key_bound: Tensor
    value_bound: Tensor
    coded: int = 0


class Blocks:
    """A store in which a row comes and a row dies at every step, and a plain list beside it."""

    def __init__(self, maps: tuple[int, int], pinned: int, bits: int, block: int, budget: int, seed: int) -> None:
        self.layers, self.heads = maps  # maps, and map heads
        self.pinned, self.budget, self.block = pinned, budget, block
        self.rule = QuantizedRows(name="q", replaces_rows=False, quantizes=True, bits=bits, block_rows=block)
        self.random = torch.Generator().manual_seed(seed)
        none = torch.zeros(BATCH, HEADS, 0, DIM)
        buffers = tuple(DenseRows.allocate(none, none, pinned + 1) for _ in range(LAYERS))
        empty = RowMap.empty(BATCH, torch.device("cpu"))
        self.snapshot = Snapshot(
            generations=Generations(request=1, cache=0, policy=1, state=0),
            frontier=Frontier(tokens=(0,) * BATCH),
            rows=buffers,
            maps=(empty,) * self.layers,
            scores_LBSWX=torch.zeros(LAYERS, BATCH, HEADS, 0, 1),
        )
        # Owner of a map (its layer, batch row, head) -> token -> the rows of its layers and heads.
        self.held: dict[Any, dict[int, list[tuple[int, int, Row]]]] = {
            (m, b, h): {} for m in range(self.layers) for b in range(BATCH) for h in range(self.heads)
        }
        self.merged = 0

    def owners(self, m: int, h: int) -> list[tuple[int, int]]:
        """Return the (layer, stored head) pairs that one map head stands for."""
        layers = range(LAYERS) if self.layers == 1 else [m]
        return [(layer, s) for layer in layers for s in (range(HEADS) if self.heads == 1 else [h])]

    def step(self, token: int) -> None:
        self._come(token)
        self._die(token)
        if self.snapshot.width - self.pinned - self.snapshot.rows[0].coded_slots >= 2 * self.block:
            before = self.snapshot
            self.snapshot = renewed(self.rule, self.pinned, before)
            self._note(before)
            self.check()

    def _come(self, token: int) -> None:
        old, width = self.snapshot, self.snapshot.width
        keys, values = (torch.randn(LAYERS, BATCH, HEADS, 1, DIM, generator=self.random) for _ in range(2))
        rows = []
        for layer in range(LAYERS):
            larger = old.rows[layer].grown(width, width + 1)
            larger.write(width, keys[layer], values[layer])
            rows.append(larger)
        shape = (BATCH, self.heads, 1)
        number = torch.full(shape, token, dtype=torch.int32)
        new = RowMap(columns_BMW=number, tokens_BMW=number, live_BMW=torch.ones(shape, dtype=torch.bool), ordered=True)
        states = torch.randn(LAYERS, BATCH, HEADS, 1, 1, generator=self.random)
        assert old.scores_LBSWX is not None
        self.snapshot = replace(
            old,
            rows=tuple(rows),
            maps=tuple(part.then(new) for part in old.maps),
            scores_LBSWX=torch.cat([old.scores_LBSWX, states], dim=3),
        )
        zero = torch.zeros(DIM)
        for (m, b, h), held in self.held.items():
            held[token] = [
                (layer, s, Row(keys[layer, b, s, 0], values[layer, b, s, 0], float(states[layer, b, s]), zero, zero))
                for layer, s in self.owners(m, h)
            ]

    def _die(self, token: int) -> None:
        maps = []
        for m, part in enumerate(self.snapshot.maps):
            live = part.live_BMW.clone()
            for b in range(BATCH):
                for h in range(self.heads):
                    held = self.held[m, b, h]
                    if len(held) <= self.budget:
                        continue
                    # The pinned rows and the newest stay.
                    open_tokens = [t for t in held if self.pinned <= t < token - 1]
                    choice = int(torch.randint(len(open_tokens), (1,), generator=self.random))
                    victim = open_tokens[choice]
                    del held[victim]
                    live[b, h] &= part.tokens_BMW[b, h] != victim
            maps.append(replace(part, live_BMW=live))
        self.snapshot = replace(self.snapshot, maps=tuple(maps))

    def _slots(self, snapshot: Snapshot, m: int, b: int, h: int) -> dict[int, int]:
        part = snapshot.maps[m]
        live = part.live_BMW[b, h].nonzero()[:, 0].tolist()
        return {int(part.tokens_BMW[b, h, slot]): slot for slot in live}

    def _note(self, before: Snapshot) -> None:
        """Count codings: what is read of a row changes when it is coded, and only then."""
        views = [(rows.view(before.width), now.view(self.snapshot.width), now) for rows, now in self._pairs(before)]
        for (m, b, h), held in self.held.items():
            slots, old = self._slots(self.snapshot, m, b, h), self._slots(before, m, b, h)
            for token, owners in held.items():
                for layer, s, row in owners:
                    was, now, store = views[layer]
                    at, by = slots[token], old[token]
                    if not isinstance(store, CodedRows) or not self.pinned <= at < store.pinned + store.coded_slots:
                        continue
                    if row.coded and all(torch.equal(a[b, s, by], c[b, s, at]) for a, c in zip(was, now, strict=True)):
                        continue
                    self.merged += row.coded > 0
                    if row.coded:
                        alive = self._alive(before, m, b, h, by)
                        assert alive <= self.block // 2, "rows are coded again only out of blocks at most half live"
                    row.coded += 1
                    block, place = divmod(at - self.pinned, self.block)
                    row.key_bound = row.key_bound + store.key_blocks.scales[b, s, block, 0] / 2 + 1e-5
                    row.value_bound = row.value_bound + store.value_blocks.scales[b, s, block, place] / 2 + 1e-5

    def _pairs(self, before: Snapshot) -> list[tuple[DenseRows, DenseRows]]:
        return list(zip(before.rows, self.snapshot.rows, strict=True))

    def _alive(self, snapshot: Snapshot, m: int, b: int, h: int, slot: int) -> int:
        first = slot - (slot - self.pinned) % self.block
        return int(snapshot.maps[m].live_BMW[b, h, first : first + self.block].sum())

    def check(self) -> None:
        snapshot = self.snapshot
        views = [rows.view(snapshot.width) for rows in snapshot.rows]
        assert snapshot.scores_LBSWX is not None
        for (m, b, h), held in self.held.items():
            slots = self._slots(snapshot, m, b, h)
            assert slots.keys() == held.keys(), "every owner holds the rows it held"
            for token, owners in held.items():
                for layer, s, row in owners:
                    keys, values = (part[b, s, slots[token]] for part in views[layer])
                    assert ((keys - row.keys).abs() <= row.key_bound).all()
                    assert ((values - row.values).abs() <= row.value_bound).all()
                    assert float(snapshot.scores_LBSWX[layer, b, s, slots[token]]) == pytest.approx(row.state)
        blocks = snapshot.rows[0].coded_slots // self.block
        assert blocks <= self.budget // (self.block // 2 + 1) + 2


@pytest.mark.parametrize(("bits", "pinned"), [(8, 0), (4, 2)])
@pytest.mark.parametrize("maps", [(LAYERS, HEADS), (LAYERS, 1), (1, 1)], ids=["head", "layer", "token"])
@pytest.mark.parametrize(("block", "budget"), [(4, 20), (5, 17), (1, 5), (4, 6)])
def test_random_deaths(maps: tuple[int, int], pinned: int, bits: int, block: int, budget: int) -> None:
    blocks = Blocks(maps, pinned, bits, block, budget + pinned, seed=budget)
    for token in range(14 * block + 40):
        blocks.step(token)
    blocks.check()
    if block >= 4 and budget > 2 * block:
        assert blocks.merged, "some blocks were merged"
