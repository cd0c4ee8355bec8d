"""full, sliding_window and streaming_llm on the real engine equal their oracles at every frontier, turns included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from reference import full, sliding_window, streaming_llm
from transformers import LlamaForCausalLM

import hf_kvpolicy as kv

from ._models import everywhere, feed, kept, tiny_llama, tokens

LENGTHS = [1, 2, 3, 4, 7, 16, 33]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama()


def conversation(model: LlamaForCausalLM, cache: Any, expected: Callable[[int], list[int]], prompt: int) -> None:
    """A prompt, decode, a second and a third prompt segment: published positions are checked at every frontier."""
    fed = 0
    for length in (prompt, 1, 1, 1, 1, 1, 5, 1, 1, 13, 1):
        feed(model, cache, tokens(length, seed=fed + 1))
        fed += length
        assert kept(cache) == everywhere(expected(fed)), f"at frontier {fed}"
        assert cache.stored_rows(1).tolist() == [[len(expected(fed))] * 2]
        assert cache.get_seq_length() == cache.state.source_committed_frontier == fed
    cache.check_integrity()


@pytest.mark.proves("kept_rows", policy="full", family="llama")
@pytest.mark.parametrize("prompt", LENGTHS)
def test_full(model: LlamaForCausalLM, prompt: int) -> None:
    conversation(model, kv.FullCache(model), full.kept_positions, prompt)


@pytest.mark.proves("kept_rows", policy="sliding_window", family="llama")
@pytest.mark.parametrize("prompt", LENGTHS)
def test_sliding_window(model: LlamaForCausalLM, prompt: int) -> None:
    for budget in sorted({1, 2, 3, 8, prompt, prompt + 1, prompt + 5}):
        cache = kv.SlidingWindowCache(model, budget=budget)
        conversation(model, cache, lambda fed, b=budget: sliding_window.kept_positions(fed, b), prompt)


@pytest.mark.proves("kept_rows", policy="streaming_llm", family="llama")
@pytest.mark.parametrize("prompt", LENGTHS)
@pytest.mark.parametrize("positions", ["cache_local", "original"])
def test_streaming_llm(model: LlamaForCausalLM, prompt: int, positions: str) -> None:
    for sinks in (0, 1, 4):
        for budget in sorted({sinks + 1, sinks + 3, sinks + prompt, prompt + 7}):
            cache = kv.StreamingLLMCache(model, budget=budget, sinks=sinks, positions=positions)
            conversation(model, cache, lambda fed, b=budget, s=sinks: streaming_llm.kept_positions(fed, b, s), prompt)


@pytest.mark.parametrize("protect", [[0], [2, 5], [0, 1, 2, 9], [18, 3]])
@pytest.mark.parametrize("prompt", [1, 4, 16])
def test_protected_rows_stay_inside_the_budget(model: LlamaForCausalLM, protect: list[int], prompt: int) -> None:
    for spare in (1, 3):
        budget = len(protect) + spare
        cache = kv.SlidingWindowCache(model, budget=budget, protect=protect)
        conversation(model, cache, lambda fed, b=budget: sliding_window.kept_positions(fed, b, protect), prompt)
        for positions in ("cache_local", "original"):
            more = budget + 2
            sinks_cache = kv.StreamingLLMCache(model, budget=more, sinks=2, positions=positions, protect=protect)
            conversation(
                model, sinks_cache, lambda fed, b=more: streaming_llm.kept_positions(fed, b, 2, protect), prompt
            )


@pytest.mark.parametrize("chunks", [[3, 4, 9], [1, 15], [8, 8], [15, 1]])
@pytest.mark.parametrize("declared", [None, "hold", "bounded"])
def test_a_chunked_prompt_ends_in_the_set_of_the_whole(
    model: LlamaForCausalLM, chunks: list[int], declared: str | None
) -> None:
    for cache in (
        kv.SlidingWindowCache(model, budget=5, chunked_prefill=declared),
        kv.StreamingLLMCache(model, budget=5, sinks=2, chunked_prefill=declared),
    ):
        for number, length in enumerate(chunks):
            feed(model, cache, tokens(length, seed=number))
        if declared == "hold":
            cache.finish_prefill()
        sinks = cache.composition.sinks
        assert kept(cache) == everywhere(streaming_llm.kept_positions(16, 5, sinks))
