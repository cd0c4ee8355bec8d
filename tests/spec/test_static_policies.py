"""Worked examples of 0x04 and 0x05: window trace, sinks union and rollover, cancel and resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference.streaming_llm import cache_local_positions, kept_positions
from transformers import DynamicCache, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument
from hf_kvpolicy.contract import Phase
from hf_kvpolicy.contract.transaction import ALL_LAYERS

from ._models import everywhere, feed, kept, tiny_llama, tokens


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


# -- 0x03, 0x04 -----------------------------------------------------------------------------------------------------


def test_window_trace(model: LlamaForCausalLM) -> None:
    """W = 3, a prompt of four, decode positions 4..7."""
    cache = kv.SlidingWindowCache(model, budget=3)
    feed(model, cache, tokens(4))
    trace = [kept(cache)]
    for position in range(4, 8):
        feed(model, cache, tokens(1, seed=position))
        trace.append(kept(cache))
    assert trace == [everywhere(p) for p in ([1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5, 6], [5, 6, 7])]
    # The fact at position 2 is not directly visible at F = 8.
    assert cache.state.omitted_interval_summary == (((0, 5),),)


@pytest.mark.parametrize(("policy", "instances"), [("sliding_window", 12), ("full", 22)])
def test_history_read_while_decoding(model: LlamaForCausalLM, policy: str, instances: int) -> None:
    """Over cached-history frontiers 4..7 the window reads 12 position instances and the full cache 22."""
    cache = kv.make_cache(policy, model, **({"budget": 3} if policy == "sliding_window" else {}))
    feed(model, cache, tokens(4))
    read = 0
    for position in range(4, 8):
        read += int(cache.stored_rows(0)[0, 0])
        feed(model, cache, tokens(1, seed=position))
    assert read == instances


def test_the_prompt_row_that_never_was_published_is_not_an_eviction_of_a_parent(model: LlamaForCausalLM) -> None:
    cache = kv.SlidingWindowCache(model, budget=3)
    feed(model, cache, tokens(4))
    assert cache.receipt.selected_original_positions == (((1, 2, 3), (1, 2, 3)), ((1, 2, 3), (1, 2, 3)))
    assert cache.state.omitted_interval_summary == (((0, 1),),)
    assert cache.statistics.publications == 1


def test_generations_and_frontiers_of_a_full_cache_follow_one_another(model: LlamaForCausalLM) -> None:
    cache = kv.FullCache(model)
    before = cache.state
    for fed, length in ((5, 5), (6, 1), (7, 1)):
        feed(model, cache, tokens(length, seed=fed))
        after = cache.state
        assert after.source_committed_frontier == fed
        assert after.cache_generation == before.cache_generation + 1
        assert cache.receipt.parent.cache == before.cache_generation
        before = after


# -- 0x05 -----------------------------------------------------------------------------------------------------------

UNION = {
    1: [0], 2: [0, 1], 3: [0, 1, 2], 4: [0, 1, 2, 3], 5: [0, 1, 2, 3, 4],
    6: [0, 1, 3, 4, 5], 7: [0, 1, 4, 5, 6], 8: [0, 1, 5, 6, 7],
}  # fmt: skip


@pytest.mark.parametrize("positions", ["cache_local", "original"])
@pytest.mark.parametrize("prompt", range(1, 9))
def test_sinks_union_and_first_rollover(model: LlamaForCausalLM, prompt: int, positions: str) -> None:
    """K_s = 2, W = 3: the union is five rows at F = 5 and loses its first middle row at F = 6."""
    cache = kv.StreamingLLMCache(model, budget=5, sinks=2, positions=positions)
    feed(model, cache, tokens(prompt))
    assert kept(cache) == everywhere(UNION[prompt])
    for frontier in range(prompt + 1, 9):
        feed(model, cache, tokens(1, seed=frontier))
        assert kept(cache) == everywhere(UNION[frontier])


def test_the_size_is_a_union_not_a_sum() -> None:
    for frontier, expected in UNION.items():
        overlap = max(0, min(2, frontier) - max(0, frontier - 3))
        assert len(expected) == min(2, frontier) + min(3, frontier) - overlap
        assert kept_positions(frontier, 5, 2) == expected


def test_delayed_reference_visibility(model: LlamaForCausalLM) -> None:
    """At F = 8 the sink at 0 is visible, the fact at 2 is not."""
    cache = kv.StreamingLLMCache(model, budget=5, sinks=2)
    feed(model, cache, tokens(8))
    visible = [position in kept(cache)[0][0] for position in (0, 2, 7)]
    assert visible == [True, False, True]


def test_cache_local_rows_are_attended_at_consecutive_positions() -> None:
    """In one layer, decode over evicted rows equals dense attention over the kept tokens numbered 0..n-1."""
    model = tiny_llama(layers=1)
    cache = kv.StreamingLLMCache(model, budget=5, sinks=2)
    ids = tokens(12)
    feed(model, cache, ids[:, :7])
    for fed in range(7, 12):
        held = kept(cache)[0][0]
        numbers = cache_local_positions(held)
        assert list(numbers.values()) == list(range(len(held)))
        logits = feed(model, cache, ids[:, fed : fed + 1])
        dense = feed(model, DynamicCache(config=model.config), torch.cat([ids[:, held], ids[:, fed : fed + 1]], dim=1))
        torch.testing.assert_close(logits, dense, rtol=1e-4, atol=1e-4)


# -- 0x05: cancellation and resume -----------------------------------------------------------------------------------


class Cancelled(Exception):
    """What a test raises inside a forward."""


def raise_at(wanted_layer: int, wanted_phase: Phase) -> Any:
    def observer(layer: int, phase: Phase) -> None:
        if (layer, phase) == (wanted_layer, wanted_phase):
            raise Cancelled

    return observer


def at_frontier_six(model: LlamaForCausalLM, positions: str = "cache_local") -> Any:
    cache = kv.StreamingLLMCache(model, budget=5, sinks=2, positions=positions)
    feed(model, cache, tokens(4))
    for position in (4, 5):
        feed(model, cache, tokens(1, seed=position))
    return cache


BEFORE_PUBLICATION = [
    *((layer, phase) for layer in (0, 1) for phase in Phase if Phase.APPEND <= phase <= Phase.PACK),
    (ALL_LAYERS, Phase.BEGIN),
    (ALL_LAYERS, Phase.PUBLISH),
]


@pytest.mark.parametrize(("layer", "phase"), BEFORE_PUBLICATION)
@pytest.mark.parametrize("positions", ["cache_local", "original"])
def test_cancel_and_resume(model: LlamaForCausalLM, layer: int, phase: Phase, positions: str) -> None:
    cache = at_frontier_six(model, positions)
    parent, parent_receipt = cache.state, cache.receipt.digest
    assert kept(cache) == everywhere([0, 1, 3, 4, 5])

    cache._runtime.observer = raise_at(layer, phase)
    with pytest.raises(Cancelled):
        feed(model, cache, tokens(1, seed=600))
    cache._runtime.observer = None
    assert kept(cache) == everywhere([0, 1, 3, 4, 5]), "position 3 remains visible"
    assert (cache.state.generations, cache.state.source_committed_frontier) == (parent.generations, 6)
    assert cache.receipt.digest == parent_receipt
    cache.check_integrity()

    resumed = feed(model, cache, tokens(1, seed=601))
    assert kept(cache) == everywhere([0, 1, 4, 5, 6])
    state = cache.state
    assert (state.cache_generation, state.state_generation) == (
        parent.cache_generation + 2,
        parent.state_generation + 2,
    ), "the cancelled candidate has consumed its numbers"
    assert state.parent_state_generation == parent.state_generation
    assert state.source_committed_frontier == 7
    cache.check_integrity()

    never_cancelled = at_frontier_six(model, positions)
    assert torch.equal(resumed, feed(model, never_cancelled, tokens(1, seed=601))), "stale K/V was read"
    assert kept(never_cancelled) == kept(cache)


@pytest.mark.parametrize("phase", [Phase.RELEASE, Phase.EXPORT])
def test_a_failure_after_publication_resurrects_nothing(model: LlamaForCausalLM, phase: Phase) -> None:
    cache = at_frontier_six(model)
    cache._runtime.observer = raise_at(ALL_LAYERS, phase)
    with pytest.raises(Cancelled):
        feed(model, cache, tokens(1, seed=6))
    cache._runtime.observer = None
    assert kept(cache) == everywhere([0, 1, 4, 5, 6])
    cache.check_integrity()
    logits = feed(model, cache, tokens(1, seed=7))
    assert kept(cache) == everywhere([0, 1, 5, 6, 7])
    other = at_frontier_six(model)
    feed(model, other, tokens(1, seed=6))
    assert torch.equal(logits, feed(model, other, tokens(1, seed=7)))


@pytest.mark.parametrize("explicit", [True, False])
def test_two_cancellations_in_a_row(model: LlamaForCausalLM, explicit: bool) -> None:
    cache = at_frontier_six(model)
    parent = cache.state
    for attempt, layer in enumerate((1, 0)):
        cache._runtime.observer = raise_at(layer, Phase.PACK)
        with pytest.raises(Cancelled):
            feed(model, cache, tokens(1, seed=100 + attempt))
        if explicit:
            cache.rollback()
        assert cache.state.generations == parent.generations
    cache._runtime.observer = None
    feed(model, cache, tokens(1, seed=6))
    assert cache.state.state_generation == parent.state_generation + 3


@pytest.mark.parametrize("where", ["mlp", "attention"])
def test_a_layer_that_raises_leaves_the_parent(model: LlamaForCausalLM, where: str) -> None:
    """The model itself fails, in layer 0, without the engine's observer."""
    cache = at_frontier_six(model)
    parent = cache.state.generations
    layer = model.model.layers[0]

    def fail(*_: Any) -> None:
        raise Cancelled

    hook = (layer.mlp if where == "mlp" else layer.self_attn.o_proj).register_forward_pre_hook(fail)
    try:
        with pytest.raises(Cancelled):
            feed(model, cache, tokens(1, seed=6))
    finally:
        hook.remove()
    assert cache.state.generations == parent
    assert kept(cache) == everywhere([0, 1, 3, 4, 5])
    assert cache.get_seq_length() == 6
    feed(model, cache, tokens(1, seed=6))
    assert kept(cache) == everywhere([0, 1, 4, 5, 6])


def test_a_prompt_cancelled_in_its_last_layer_publishes_no_layer(model: LlamaForCausalLM) -> None:
    cache = kv.SnapKVCache(model, budget=6, window=2, kernel_size=3)
    cache._runtime.observer = raise_at(1, Phase.PACK)
    with pytest.raises(Cancelled):
        feed(model, cache, tokens(12))
    cache._runtime.observer = None
    assert kept(cache) == everywhere([])
    assert cache.get_seq_length() == 0
    with torch.inference_mode():
        model(tokens(12), **{cache_argument(): cache})
    assert [len(owner) for layer in kept(cache) for owner in layer] == [6] * 4
