"""pyramidinfer equals its oracle: kept positions of every layer, logits, counts; what it cannot give is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from reference.pyramidinfer import PyramidLlama, planned
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.allocation import DepthDecay
from hf_kvpolicy.compat import cache_argument
from hf_kvpolicy.pruning import _before_layer

from ._models import VOCAB, feed, kept, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")

LAYERS = 4
OPTIONS: dict[str, Any] = {
    "decay": 0.6, "recent_ratio": 0.2, "sinks": 2, "min_context": 2, "distance_weight": 1.5,
}  # fmt: skip


def llama(kv_heads: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=kv_heads, initializer_range=0.3, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module", params=[4, 2, 1], ids=["mha", "gqa", "mqa"])
def model(request: pytest.FixtureRequest) -> LlamaForCausalLM:
    return llama(request.param)


def follow(model: LlamaForCausalLM, pieces: list[int], **options: Any) -> kv.PyramidInferCache:
    """Feed prompts and single tokens to the cache and to its oracle; compare after each."""
    cache, oracle = kv.PyramidInferCache(model, **options), PyramidLlama(model, **options)
    for number, length in enumerate(pieces):
        ids = tokens(length, seed=number)
        logits = feed(model, cache, ids)[0]
        single = length == 1 and number
        expected = oracle.token(int(ids)) if single else oracle.prompt(ids[0].tolist())
        heads = model.config.num_key_value_heads
        assert kept(cache) == [[layer] * heads for layer in oracle.kept], f"after piece {number}"
        np.testing.assert_allclose(logits.double().numpy(), expected, atol=2e-4)
    cache.check_integrity()
    return cache


@pytest.mark.proves("kept_rows", policy="pyramidinfer", family="llama")
@pytest.mark.parametrize("prompt", [1, 2, 5, 40, 90])
@pytest.mark.parametrize("budget", [None, 8, 13])
def test_a_prompt_and_its_answer(model: LlamaForCausalLM, prompt: int, budget: int | None) -> None:
    follow(model, [prompt, 1, 1, 1], budget=budget, **OPTIONS)


@pytest.mark.parametrize("budget", [None, 9])
def test_later_prompts_compete_with_what_is_held(model: LlamaForCausalLM, budget: int | None) -> None:
    follow(model, [30, 1, 1, 17, 1, 25, 1], budget=budget, **OPTIONS)


@pytest.mark.parametrize(
    "change",
    [
        {"interval": 2}, {"interval": 3, "decay": 0.3}, {"sinks": 0}, {"protect": (3, 11, 60)}, {"recent_ratio": 0.0},
        {"recent_ratio": 0.7}, {"distance_weight": 1.0}, {"min_context": 20}, {"decay": 0.05}, {"decay": 0.9},
    ],
    ids=str,
)  # fmt: skip
def test_options(change: dict[str, Any]) -> None:
    follow(llama(2), [50, 1, 20, 1], **OPTIONS | change)


def test_a_selection_is_not_trivial() -> None:
    """The comparisons above would mean little if layers kept the newest rows, or all the same."""
    cache = follow(llama(2), [90], **OPTIONS)
    rows = [layer[0] for layer in kept(cache)]
    assert [len(layer) for layer in rows] == sorted((len(layer) for layer in rows), reverse=True)
    assert len(rows[0]) == 90 > len(rows[1]) > len(rows[2]) > len(rows[3])
    assert rows[3] != list(range(90 - len(rows[3]), 90))


def test_the_published_configurations_keep_what_they_are_known_to_keep() -> None:
    """Rows that reach a layer, of a prompt of 4096: mean over layers and last layer, for 7B, 13B and 70B."""
    for layers, decay, interval, mean, last in ((32, 0.9, 1, 0.766, 0.376), (40, 0.8, 2, 0.724, 0.30),
                                                (80, 0.9, 3, 0.78, 0.40)):  # fmt: skip
        schedule = DepthDecay(decay=decay, interval=interval, min_context=64)
        context = schedule.kept_rows([0] * layers, 4096 - 820, pinned=4)
        reach = [4096, *(820 + rows for rows in context[:-1])]
        assert abs(sum(reach) / layers / 4096 - mean) < 0.002
        assert abs(reach[-1] / 4096 - last) < 0.003


@pytest.mark.parametrize("mean_rows", [None, 3, 10, 47])
@pytest.mark.parametrize("held", [[0] * 6, [9, 8, 5, 5, 4, 1]])
def test_the_plan_equals_the_plain_one(held: list[int], mean_rows: int | None) -> None:
    for new in (0, 1, 7, 100):
        for decay, interval, min_context in ((1.0, 1, 0), (0.8, 1, 4), (0.4, 2, 0)):
            schedule = DepthDecay(decay=decay, interval=interval, min_context=min_context)
            options = {"pinned": min(3, new), "mean_rows": mean_rows}
            expected = planned(held, new, decay=decay, interval=interval, min_context=min_context, **options)
            found = schedule.kept_rows(held, new, **options)
            assert list(found) == expected
            if mean_rows is not None:
                assert sum(found) <= mean_rows * len(held)


def test_a_budget_is_the_exact_mean_where_the_schedule_keeps_more() -> None:
    model = llama(2)
    cache = kv.PyramidInferCache(model, budget=11, **OPTIONS)
    feed(model, cache, tokens(60))
    assert sum(int(cache.stored_rows(layer)[0, 0]) for layer in range(LAYERS)) == 11 * LAYERS


def test_the_transient_peak_has_the_workspace_of_scoring() -> None:
    """One head's logits and weights, fp32, beside the prompt's K/V of one layer and the packed layers."""
    model = llama(2)
    cache = kv.PyramidInferCache(model, **OPTIONS)
    feed(model, cache, tokens(200))
    ledger = cache.ledger()
    query_heads, recent, row_bytes = 2, 41, 2 * 8 * 4
    logits_bytes, layer_bytes = 4 * query_heads * recent * 200, 2 * 200 * row_bytes
    packed_bytes = ledger.payload_bytes + ledger.slack_bytes
    least = packed_bytes + layer_bytes + 2 * logits_bytes
    assert least <= ledger.transient_peak_bytes <= least + 0.5 * logits_bytes


def test_deeper_layers_compute_only_what_is_passed_on() -> None:
    model, seen = llama(2), []
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _, args: seen.append(args[0].shape[1]))
    cache = kv.PyramidInferCache(model, **OPTIONS)
    feed(model, cache, tokens(60))
    held = [int(cache.stored_rows(layer)[0, 0]) for layer in range(LAYERS)]
    assert seen == [60, *held[:-1]]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_backends_agree(attention: str) -> None:
    plain, other = llama(2), llama(2)
    other.set_attn_implementation(attention)
    caches = [kv.PyramidInferCache(m, **OPTIONS) for m in (plain, other)]
    logits = [feed(m, c, tokens(50)) for m, c in zip((plain, other), caches, strict=True)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0)
    assert kept(caches[0]) == kept(caches[1])


class TestRefusals:
    """A token that is dropped has no output: what needs one is refused before any state moves."""

    def refused(self, call: Any, model: LlamaForCausalLM, cache: Any, words: str) -> None:
        with pytest.raises(kv.ConfigError, match=words), torch.no_grad():
            call()
        assert cache.get_seq_length() == 0
        feed(model, cache, tokens(30))
        cache.check_integrity()

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ({}, "logits of every position"),
            ({"logits_to_keep": 3}, "more logits"),
            ({"logits_to_keep": torch.tensor([29])}, "more logits"),
            ({"logits_to_keep": 1, "labels": tokens(30)}, "labels"),
            ({"logits_to_keep": 1, "output_hidden_states": True}, "output_hidden_states"),
        ],
    )
    def test_outputs_of_dropped_positions(self, arguments: dict[str, Any], words: str) -> None:
        model = llama(2)
        cache = kv.PyramidInferCache(model, **OPTIONS)
        self.refused(lambda: model(tokens(30), **{cache_argument(): cache}, **arguments), model, cache, words)

    def test_the_bare_decoder(self) -> None:
        model = llama(2)
        cache = kv.PyramidInferCache(model, **OPTIONS)
        self.refused(lambda: model.model(tokens(30), **{cache_argument(): cache}), model, cache, "decoder's output")

    def test_past_recording(self) -> None:
        model = llama(2)
        cache = kv.PyramidInferCache(model, **OPTIONS)
        cache.activate_past_recording()
        with pytest.raises(kv.ConfigError, match="past recording"):
            feed(model, cache, tokens(30))
        cache.set_recording(False)
        feed(model, cache, tokens(30))

    @pytest.mark.proves("recorded", policy="pyramidinfer", family="llama", refused=True)
    @pytest.mark.allow_deprecated  # transformers' own candidate generator passes a generation_config and arguments
    @pytest.mark.parametrize("kind", ["assistant_model", "prompt_lookup_num_tokens"])
    def test_assisted_decoding(self, kind: str) -> None:
        model = llama(2)
        cache = kv.PyramidInferCache(model, **OPTIONS)
        helper = llama(2) if kind == "assistant_model" else 3
        with pytest.raises(kv.ConfigError, match="assisted decoding"):
            model.generate(tokens(30), max_new_tokens=4, do_sample=False, **{cache_argument(): cache, kind: helper})

    def test_a_short_prompt_has_all_its_logits(self) -> None:
        model = llama(2)
        cache = kv.PyramidInferCache(model)
        with torch.no_grad():
            found = model(tokens(30), **{cache_argument(): cache}).logits
            expected = model(tokens(30), **{cache_argument(): DynamicCache(config=model.config)}).logits
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("change", [{"unit": "head"}, {"unit": "token"}, {"chunked_prefill": "hold"}])
    def test_contracts_that_cannot_exist(self, change: dict[str, Any]) -> None:
        with pytest.raises(kv.ManifestError, match=r"Use unit='layer'\.$|use chunked_prefill='bounded'"):
            kv.PyramidInferCache(llama(2).config, **change)

    @pytest.mark.parametrize(
        "change",
        [{"decay": 0.0}, {"decay": 1.1}, {"interval": 0}, {"min_context": -1}, {"recent_ratio": 1.5},
         {"distance_weight": 0.0}, {"sinks": -1}, {"variant": "reference"}],
        ids=str,
    )  # fmt: skip
    def test_options_outside_their_range(self, change: dict[str, Any]) -> None:
        with pytest.raises(kv.ConfigError):
            kv.PyramidInferCache(llama(2).config, **change)


class TestHooks:
    def hooked(self, model: LlamaForCausalLM) -> int:
        return sum(_before_layer in layer._forward_pre_hooks.values() for layer in model.model.layers)

    def test_they_come_once_and_go_with_detach(self) -> None:
        model = llama(2)
        cache = kv.PyramidInferCache(model, **OPTIONS)
        assert not self.hooked(model)
        feed(model, cache, tokens(30))
        feed(model, cache, tokens(12, seed=5))
        assert self.hooked(model) == LAYERS - 1
        kv.detach(model)
        assert not self.hooked(model)
        assert not model._forward_pre_hooks
        assert not model.model._forward_pre_hooks

    def test_another_cache_does_not_notice_them(self) -> None:
        model = llama(2)
        plain = feed(model, DynamicCache(config=model.config), tokens(40))
        snap = feed(model, kv.SnapKVCache(model, budget=8, window=3), tokens(40))
        feed(model, kv.PyramidInferCache(model, **OPTIONS), tokens(30))
        assert torch.equal(feed(model, DynamicCache(config=model.config), tokens(40)), plain)
        assert torch.equal(feed(model, kv.SnapKVCache(model, budget=8, window=3), tokens(40)), snap)

    def test_a_forward_that_died_half_pruned_leaves_nothing(self) -> None:
        model = llama(2)
        cache = kv.PyramidInferCache(model, **OPTIONS)
        feed(model, cache, tokens(30))
        before, state = kept(cache), cache.state.state_generation
        for layer in range(LAYERS):
            handle = model.model.layers[layer].mlp.register_forward_pre_hook(_fail)
            if layer < LAYERS - 1:  # after the last attention the successor is published
                with pytest.raises(RuntimeError, match="dead"):
                    feed(model, cache, tokens(20, seed=2))
                assert (kept(cache), cache.state.state_generation) == (before, state)
            handle.remove()
        twin = kv.PyramidInferCache(model, **OPTIONS)
        feed(model, twin, tokens(30))
        assert torch.equal(feed(model, cache, tokens(20, seed=2)), feed(model, twin, tokens(20, seed=2)))


def _fail(*_: Any) -> None:
    raise RuntimeError("dead")
