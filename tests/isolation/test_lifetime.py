"""A cache and its buffers die with the last reference, without the garbage collector's help."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers import PRUNING, case_id, forward, generate, make_cache, policy_units, prompt, stored_otherwise, tiny

import hf_kvpolicy as kv

CASES = [
    ("full", {}),
    *policy_units(),
    *stored_otherwise(),
    ("snapkv", {"budget": 8, "window": 3, "chunked_prefill": "hold"}),
]


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def watched(cache: Any) -> list[weakref.ref[Any]]:
    """Return weak references to a cache and all that it holds."""
    runtime = cache._runtime
    snapshots = [runtime.snapshot, *([] if runtime.waiting is None else [runtime.waiting.snapshot])]
    tensors = [tensor for snapshot in snapshots for rows in snapshot.buffers for tensor in rows.tensors()]
    return [weakref.ref(thing) for thing in (cache, runtime, *tensors)]


def alive(references: list[weakref.ref[Any]]) -> list[str]:
    return [type(found).__name__ for reference in references if (found := reference()) is not None]


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_used_cache_is_freed_at_once(case: Any) -> None:
    model = tiny("llama")
    cache = make_cache(case[0], model, **case[1])
    with torch.no_grad():
        generate(model, prompt(14, 1), cache, new=5)
        columns = cache.get_seq_length()
        if case[0] not in PRUNING:
            cache.activate_past_recording()
        forward(model, prompt(3, 2), cache)
    assert cache.get_seq_length() == columns + 3
    # Records outlive the cache and must not keep its rows.
    records = cache.manifest, cache.state, cache.receipt, cache.ledger(), repr(cache)
    twin, references = cache.fork(), watched(cache)
    del cache
    assert not alive(references)
    references = watched(twin)
    if case[0] not in PRUNING:
        twin.crop(-1)
    del twin
    assert not alive(references)
    assert records[0].policy_manifest_id.endswith(case[0])
    # A state of rows that replace others has no positions; its receipt says what they stand for.
    with pytest.raises(kv.StaleGenerationError, match="is gone"):
        _ = records[2].digest if records[1].replacement_object_ids else records[1].selected_original_positions


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_selection_frees_its_parent(case: Any) -> None:
    """Nothing but the published rows stays after a publication that moved them, not even for a kept state."""
    model = tiny("llama")
    cache = make_cache(case[0], model, **case[1])
    with torch.no_grad():
        forward(model, prompt(14, 1), cache)
        forward(model, prompt(1, 2), cache)
        parent, state, receipt = watched(cache)[2:], cache.state, cache.receipt
        cache.reorder_cache(torch.tensor([0]))
    assert not alive(parent)
    with pytest.raises(kv.StaleGenerationError, match="has published generation"):
        _ = receipt.digest if state.replacement_object_ids else state.selected_original_positions


def test_a_cache_does_not_keep_its_model() -> None:
    model = tiny("llama")
    cache = kv.SnapKVCache(model, budget=6, window=3)
    forward(model, prompt(12, 7), cache)
    old = cache.manifest.checkpoint_generation
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert cache.get_seq_length() == 12
    other = kv.attach(tiny("llama", seed=1))
    with pytest.raises(kv.ConfigError, match="belongs to another LlamaModel"):
        forward(other, prompt(1), cache)
    cache.reset()
    forward(other, prompt(12), cache)
    twin = kv.SnapKVCache(other, budget=6, window=3)
    assert cache.manifest.checkpoint_generation == twin.manifest.checkpoint_generation != old
