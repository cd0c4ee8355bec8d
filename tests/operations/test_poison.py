"""What lies in a slot that no live row occupies never reaches an output.

NaN beyond the slots in use (never attended), +-1e30 in dead slots inside the attended rectangle (masked there): after
each operation, for every policy, with padded batches. A clean twin runs beside it and must agree bit for bit.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    BACKENDS,
    PRUNING,
    TRAINED,
    case_id,
    forward,
    left_padded,
    make_cache,
    policy_units,
    prompt,
    stored_otherwise,
    tiny,
)
from torch import Tensor

EXTRA = [
    ("snapkv", {"budget": 8, "window": 3, "chunked_prefill": "hold"}),
    ("snapkv", {"budget": 8, "window": 3, "on_append": "append"}),
    ("snapkv", {"budget": 0.5, "window": 3, "unit": "token"}),
    ("streaming_llm", {"budget": 9, "sinks": 2, "protect": [4, 15]}),
    ("sliding_window", {"budget": 0.5}),
]
CASES = [("full", {}), *policy_units(), *stored_otherwise(), *EXTRA]


def poison(cache: Any) -> int:
    """Overwrite every slot that holds no live row, published or waiting; return how many were inside the rectangle."""
    runtime, inside = cache._runtime, 0
    snapshots = [runtime.snapshot, *([] if runtime.waiting is None else [runtime.waiting.snapshot])]
    if snapshots[-1].ragged:
        # The published rows of a waiting forward lie in the same buffers, or in ones that are no longer read.
        return poison_ragged(snapshots[-1])
    if snapshots[0].pairs:
        inside += poison_pairs(snapshots)
    for layer in range(len(snapshots[-1].rows)):
        for snapshot in snapshots:
            if not snapshot.rows:
                continue
            rows, live = snapshot.rows[layer], snapshot.full_map(layer).live_BMW
            width = snapshot.width
            if snapshot is not snapshots[-1] and rows is snapshots[-1].rows[layer]:
                continue  # the waiting rows lie in the same buffers
            heads = rows.keys_BSCD.shape[1]
            dead = ~live.expand(-1, heads, -1)
            inside += int(dead.sum())
            if rows.coded_slots:
                dead = poison_blocks(rows, dead)
                width -= rows.coded_slots
            sign = torch.where(torch.arange(width) % 2 == 0, 1e30, -1e30)[None, None, :, None]
            for buffer in (rows.keys_BSCD, rows.values_BSCD):
                buffer[:, :, width:] = float("nan")
                part = buffer[:, :, :width]
                part.copy_(torch.where(dead[..., None], sign, part))
    return inside


def poison_blocks(rows: Any, dead: Tensor) -> Tensor:
    """As `poison`: dead rows of blocks, whose codes stay what 8 bits are; return which of the other slots are dead."""
    blocks = slice(rows.pinned, rows.pinned + rows.coded_slots)
    coded = dead[:, :, blocks].unflatten(2, (-1, rows.block_rows))
    for store in (rows.key_blocks, rows.value_blocks):
        store.codes_BSNGX[coded] = 127
    rows.value_blocks.scales[coded] = rows.value_blocks.zeros[coded] = 1e30
    rows.key_blocks.scales[coded.all(-1)] = 1e30
    return torch.cat([dead[:, :, : blocks.start], dead[:, :, blocks.stop :]], dim=2)


def poison_pairs(snapshots: list[Any]) -> int:
    """As `poison`: slots of merged rows, entries of the logs of exceptions, and rows that are not merged yet."""
    last, inside = snapshots[-1], 0
    for pair in last.pairs:
        # What waits lies behind the merged slots, which are those that are published.
        width, dead = pair.merged_slots, ~last.full_map(pair.layers[0]).live_BMW
        inside += int(dead.sum())
        for store in (pair.keys, pair.values):
            store.shared_BHCD[:, :, width:] = store.magnitudes_2BHC[..., width:] = float("nan")
            store.index_E[store.exceptions :] = -1
            store.rows_2ED[:, store.exceptions :] = float("nan")
            here = dead[:, :, :width].expand(-1, store.shared_BHCD.shape[1], -1)
            store.shared_BHCD[:, :, :width][here] = 1e30
            store.magnitudes_2BHC[:, :, :, :width][here.expand(2, -1, -1, -1)] = 1.0
        for rows in pair.unmerged:
            for buffer in rows.view(last.width - width):
                buffer[dead[:, :, width:].expand(-1, buffer.shape[1], -1)] = 1e30
    return inside


def poison_ragged(snapshot: Any) -> int:
    """Overwrite slack behind every owner with NaN and dead tail slots with 1e30; return how many of the latter.

    A spare slot among an owner's rows is filled before it is attended: NaN, and counted.
    """
    # What waits to be merged lies in no slot yet.
    inside, tail = 0, None if snapshot.pending else snapshot.tail
    for stored in snapshot.ragged:
        if stored.rows.coded_slots:
            inside += poison_owners(stored, tail)
            continue
        for owner, base in enumerate(stored.map.lengths):
            dead = torch.zeros(0, dtype=torch.bool) if tail is None else ~tail.live_BMW[owner // stored.map.heads, 0]
            keys, values = stored.rows.owner(owner, stored.rows.capacities[owner])
            spare = stored.map.spare_O
            if spare is not None:
                assert not dead.shape[0], "rows are packed before anything is appended behind them"
                slots = stored.map.slots().split(stored.map.lengths)[owner]
                free = torch.ones(keys.shape[0], dtype=torch.bool).index_fill(0, slots, False)
                assert int(spare[owner]) >= keys.shape[0] or free[int(spare[owner])]
                keys[free] = values[free] = float("nan")
                inside += int(free[:base].sum())
                continue
            for buffer in (keys, values):
                buffer[base + dead.shape[0] :] = float("nan")
                buffer[base : base + dead.shape[0]][dead] = 1e30
            inside += int(dead.sum())
    return inside


def poison_owners(stored: Any, tail: Any) -> int:
    """As `poison_ragged`, behind the blocks of every owner; dead rows in blocks as in `poison_blocks`."""
    inside, plain, blocks = 0, stored.rows.plain(), stored.rows.blocks
    # Places that no slot names: of rows that were dropped.
    named = torch.zeros(blocks.all_places, dtype=torch.bool)
    named[blocks.places()] = True
    for owner, (base, coded) in enumerate(zip(stored.map.lengths, stored.rows.coded, strict=True)):
        dead = torch.zeros(base, dtype=torch.bool)
        if tail is not None:
            dead = torch.cat([dead, ~tail.live_BMW[owner // stored.map.heads, 0]])
        spare = stored.map.spare_O
        for buffer in plain.owner(owner, plain.capacities[owner]):
            buffer[dead.shape[0] - coded + (spare is not None) :] = float("nan")
            buffer[: dead.shape[0] - coded][dead[coded:]] = 1e30
            if spare is not None and int(spare[owner]) - coded < buffer.shape[0]:
                buffer[int(spare[owner]) - coded] = float("nan")
        places = blocks.places().split(list(blocks.slots))[owner]
        named[places[dead[:coded]]] = False
        inside += int(dead.sum())
    unnamed = ~named.view(1, 1, -1, blocks.block_rows)
    for store in (blocks.keys, blocks.values):
        store.codes_BSNGX[unnamed] = 127
    blocks.values.scales[unnamed] = blocks.values.zeros[unnamed] = 1e30
    blocks.keys.scales[unnamed.all(-1)] = 1e30
    return inside + int(unnamed.sum())


class Pair:
    """A poisoned cache and its clean twin, fed the same."""

    def __init__(self, case: Any, model: Any, lengths: list[int]) -> None:
        self.model = model
        self.caches = [make_cache(case[0], model, **case[1]) for _ in range(2)]
        self.ids, self.mask = left_padded([prompt(n, n) for n in lengths])
        self.inside = 0

    def feed(self, ids: Tensor, new_mask: Tensor | None = None) -> None:
        rows, length = ids.shape
        if self.caches[0].get_seq_length():
            new = torch.ones((rows, length), dtype=torch.long) if new_mask is None else new_mask
            self.mask = torch.cat([self.mask, new], dim=1)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -length:]
        with torch.no_grad():
            got, want = (
                forward(self.model, ids, cache, attention_mask=self.mask, position_ids=positions)
                for cache in self.caches
            )
        real = self.mask[:, -length:].bool()[:, -got.shape[1] :]
        assert got.isfinite().all(), "even a pad's output is finite"
        assert torch.equal(got[real], want[real])
        self.after()

    def after(self) -> None:
        for cache in self.caches:
            cache.check_integrity()
        self.inside += poison(self.caches[0])

    def each(self, act: Any) -> None:
        for cache in self.caches:
            act(cache)
        self.after()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_dead_slots_never_reach_an_output(case: Any, family: str, backend: str) -> None:
    pair = Pair(case, tiny(family, backend), [14, 5, 9])
    pair.feed(pair.ids)
    for step in range(3):
        pair.feed(prompt(1, step, 3))
    pair.feed(prompt(1, 7, 3), torch.tensor([[1], [0], [1]]))
    pair.feed(prompt(4, 8, 3))
    pair.feed(prompt(3, 9, 3), torch.tensor([[1, 1, 1], [0, 0, 0], [1, 1, 0]]))
    pair.each(lambda cache: cache.reorder_cache(torch.tensor([2, 0, 0])))
    pair.mask = pair.mask[[2, 0, 0]]
    pair.feed(prompt(1, 10, 3))
    if case[0] not in PRUNING:
        pair.each(lambda cache: cache.activate_past_recording())
        pair.feed(prompt(1, 11, 3))
        pair.feed(prompt(5, 12, 3))
        pair.each(lambda cache: cache.crop(-3))
        pair.mask = pair.mask[:, :-3]
        pair.feed(prompt(1, 13, 3))
        pair.each(lambda cache: cache.set_recording(False))
    for step in range(14, 18):
        pair.feed(prompt(1, step, 3))
    # Pads are never merged: no slot of a segment is dead.
    assert pair.inside or case[0] in TRAINED, "the batch left dead slots inside the rectangle"


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_recorded_prompt_and_failed_forward(case: Any) -> None:
    pair = Pair(case, tiny("llama"), [14, 6])
    if case[0] in PRUNING:
        pair.feed(pair.ids)
    else:
        pair.each(lambda cache: cache.activate_past_recording())
        pair.feed(pair.ids)
        pair.each(lambda cache: cache.crop(-2))
        pair.mask = pair.mask[:, :-2]
        pair.each(lambda cache: cache.set_recording(False))
    for step in range(3):
        # A failed forward leaves broken rows in spare slots of one cache only.
        handle = pair.model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda *a: a[-1] * float("nan"))
        stop = pair.model.model.layers[1].self_attn.o_proj.register_forward_pre_hook(_stop)
        before = pair.caches[0]._runtime.snapshot
        wider = torch.cat([pair.mask, torch.ones_like(pair.mask[:, :1])], dim=1)
        pair.caches[0]._runtime.observer = _stop_before_publication
        with pytest.raises(KeyboardInterrupt):
            forward(
                pair.model,
                prompt(1, 50 + step, 2),
                pair.caches[0],
                attention_mask=wider,
                position_ids=(wider.cumsum(-1) - 1)[:, -1:],
            )
        pair.caches[0]._runtime.observer = None
        handle.remove()
        stop.remove()
        if case[1].get("chunked_prefill") != "hold":  # there the end of the prompt was published first
            assert pair.caches[0]._runtime.snapshot is before
        pair.feed(prompt(1, step, 2))


def _stop(*_: Any) -> None:
    raise KeyboardInterrupt


def _stop_before_publication(layer: int, phase: Any) -> None:
    from hf_kvpolicy.contract import Phase

    if layer == 1 and phase == Phase.PACK:
        raise KeyboardInterrupt
