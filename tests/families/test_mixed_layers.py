"""Models of full and sliding (or chunked) layers: the policy acts on the full ones, all share every forward's fate."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    WINDOW_TOKENS,
    assert_same_content,
    dynamic_cache,
    forward,
    generate,
    greedy_loop,
    neutral_cache,
    prompt,
)

import hf_kvpolicy as kv
from hf_kvpolicy.replay import capture_prompt, replay_prompt

from ._table import MIXED, tiny

# Sliding layers come first and last in one, last in the other: a forward ends with a layer of either kind.
FAMILIES = ("gemma2", "qwen2-mixed", "llama4")
SMALL: dict[str, Any] = {"budget": 8, "window": 3, "kernel_size": 3}

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def sliding(cache: kv.PolicyCache) -> list[int]:
    return [layer for layer in range(len(cache.layers)) if layer not in cache.policy_layers]


def held(cache: Any) -> dict[int, tuple[torch.Tensor, torch.Tensor, int]]:
    """What the sliding layers hold."""
    layers = [(i, layer) for i, layer in enumerate(cache.layers) if is_sliding(layer)]
    return {i: (layer.keys, layer.values, layer.get_seq_length()) for i, layer in layers}


def is_sliding(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def assert_held(cache: Any, wanted: dict[int, tuple[torch.Tensor, torch.Tensor, int]], atol: float = 1e-5) -> None:
    found = held(cache)
    assert found.keys() == wanted.keys()
    for layer, (keys, values, columns) in wanted.items():
        torch.testing.assert_close(found[layer][0], keys, atol=atol, rtol=0)
        torch.testing.assert_close(found[layer][1], values, atol=atol, rtol=0)
        assert found[layer][2] == columns


def test_layers_are_named_by_the_models_numbers(family: str) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    generate(model, prompt(20), cache)
    kinds = model.config.layer_types
    assert cache.policy_layers == tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    assert [is_sliding(layer) for layer in cache.layers] == [kind != "full_attention" for kind in kinds]
    for layer in cache.policy_layers:
        assert cache.stored_rows(layer).tolist() == [[8 + 5] * 2]
    for layer in sliding(cache):
        assert cache.layers[layer].keys.shape[2] == WINDOW_TOKENS - 1
        with pytest.raises(kv.ConfigError, match="does not act on layer"):
            cache.positions(layer)
    manifest = cache.manifest.tensor_contract
    assert manifest.num_layers == len(cache.policy_layers)


@pytest.mark.parametrize("family", ["gemma2", "llama4"])
def test_a_first_sliding_layer_holds_what_it_would_without_a_policy(family: str) -> None:
    """Its rows depend on tokens alone, so eviction in later layers must not change a bit of them."""
    model, twin = tiny(family), tiny(family)
    cache, stock = kv.SnapKVCache(model, **SMALL), dynamic_cache(twin)
    talk = generate(model, prompt(20), cache)
    for piece in talk[:, :20], *talk[:, 20:-1].split(1, dim=1):
        with torch.no_grad():
            forward(twin, piece, stock)
    assert torch.equal(cache.layers[0].keys, stock.layers[0].keys)
    assert torch.equal(cache.layers[0].values, stock.layers[0].values)


class Died(Exception):
    """Raised on purpose inside a forward."""


@pytest.mark.proves("failures", policy="snapkv")
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [1, 5])
def test_a_forward_that_dies_leaves_no_trace(family: str, layer: int, length: int) -> None:
    model = tiny(family)
    cache, calm = (kv.SnapKVCache(model, **SMALL) for _ in range(2))
    for each in (cache, calm):
        generate(model, prompt(20), each)
    before, receipt = held(cache), cache.receipt

    def die(*_: Any) -> None:
        raise Died

    block = model.model.layers[layer]
    handle = (block.feed_forward if family == "llama4" else block.mlp).register_forward_pre_hook(die)
    with pytest.raises(Died), torch.no_grad():
        forward(model, prompt(length, seed=3), cache)
    handle.remove()
    if layer == 3:
        # Every layer's attention had returned, so the forward was published.
        with torch.no_grad():
            forward(model, prompt(length, seed=3), calm)
    else:
        cache.rollback()
        assert cache.receipt == receipt
        assert_held(cache, before, atol=0)
    with torch.no_grad():
        found, wanted = (forward(model, prompt(2, seed=4), each) for each in (cache, calm))
    assert torch.equal(found, wanted)
    assert_same_content(cache, calm, atol=0)


def test_copies_forks_and_branches_do_not_touch_one_another(family: str) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    generate(model, prompt(20), cache)
    before = held(cache)
    twin, copied = cache.fork(), copy.deepcopy(cache)
    with cache.branch(), torch.no_grad():
        branched = forward(model, prompt(4, seed=2), cache)
    with torch.no_grad():
        assert torch.equal(forward(model, prompt(4, seed=2), twin), branched)
    assert_held(cache, before, atol=0)
    assert_held(copied, before, atol=0)
    with torch.no_grad():
        assert torch.equal(forward(model, prompt(4, seed=2), copied), branched)
    cache.reset()
    assert all(columns == 0 and keys is None for keys, _, columns in held(cache).values())
    again = kv.SnapKVCache(model, **SMALL)
    assert torch.equal(generate(model, prompt(9), cache), generate(model, prompt(9), again))


def test_batch_rows_are_selected_and_repeated(family: str) -> None:
    model = tiny(family)
    cache, stock = neutral_cache("snapkv", model, 64), dynamic_cache(tiny(family))
    ids = prompt(12, rows=3)
    with torch.no_grad():
        for runner, each in ((model, cache), (tiny(family), stock)):
            forward(runner, ids, each)
            each.batch_select_indices(torch.tensor([2, 0]))
            each.batch_repeat_interleave(2)
            each.reorder_cache(torch.tensor([3, 1, 1, 0]))
            forward(runner, ids[[0, 0, 2, 2]][:, :2], each)
    assert_held(cache, held(stock))
    cache.check_integrity()


@pytest.mark.parametrize("fed", [4, 12])
def test_recorded_tokens_are_taken_back(family: str, fed: int) -> None:
    """Accepting some of what was recorded leaves sliding layers as transformers' own: within the window and past it."""
    model, twin = tiny(family), tiny(family)
    cache, straight = (neutral_cache("snapkv", model, 64) for _ in range(2))
    stock, ids = dynamic_cache(twin), prompt(fed + 5)
    with torch.no_grad():
        forward(model, ids[:, :fed], straight)
        for runner, each in ((model, cache), (twin, stock)):
            forward(runner, ids[:, :fed], each)
            each.activate_past_recording()
            forward(runner, ids[:, fed:], each)
            each.crop(-3)
            forward(runner, ids[:, fed + 2 : fed + 3], each)
            each.crop(0)
        for at in range(fed, fed + 3):
            forward(model, ids[:, at : at + 1], straight)
    assert_held(cache, held(stock))
    assert_held(cache, held(straight))
    assert_same_content(cache, straight)


def test_taking_back_what_a_window_has_let_go_of_is_refused(family: str) -> None:
    model = tiny(family)
    cache = neutral_cache("snapkv", model, 64)
    with torch.no_grad():
        forward(model, prompt(12), cache)
        with pytest.raises(kv.StaleGenerationError, match="activate_past_recording"):
            cache.crop(-2)
        short = neutral_cache("snapkv", model, 64)
        forward(model, prompt(5), short)
        short.crop(-2)
        stock = dynamic_cache(tiny(family))
        forward(tiny(family), prompt(5)[:, :3], stock)
    assert_held(short, held(stock))
    assert cache.get_seq_length() == 12
    cache.check_integrity()


@pytest.mark.proves("parity_assisted", policy="snapkv")
@pytest.mark.allow_deprecated  # transformers' own candidate generator passes a generation_config and arguments
def test_prompt_lookup(family: str) -> None:
    ids = torch.cat([prompt(9), prompt(9)], dim=1)
    answers = []
    for neutral in (False, True):
        model = tiny(family)
        cache = neutral_cache("snapkv", model, 64) if neutral else dynamic_cache(model)
        answers.append(generate(model, ids, cache, 10, prompt_lookup_num_tokens=3))
    assert torch.equal(*answers)


def test_chunks_that_are_held_are_selected_from_as_one_prompt(family: str) -> None:
    model = tiny(family)
    whole, chunked = kv.SnapKVCache(model, **SMALL), kv.SnapKVCache(model, **SMALL, chunked_prefill="hold")
    ids = prompt(20)
    with torch.no_grad():
        forward(model, ids, whole)
        for piece in ids.split(6, dim=1):
            forward(model, piece, chunked)
        chunked.finish_prefill()
    assert_same_content(chunked, whole)
    assert_held(chunked, held(whole))


def test_a_captured_prompt_is_replayed(family: str) -> None:
    model = tiny(family)
    run, replayed = (kv.SnapKVCache(model, **SMALL) for _ in range(2))
    with torch.no_grad():
        forward(model, prompt(20), run)
        replay_prompt(replayed, model, capture_prompt(model, prompt(20)))
        assert_same_content(replayed, run)
        assert_held(replayed, held(run))
        found, wanted = (forward(model, prompt(1), each) for each in (replayed, run))
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_bytes_of_sliding_layers_are_charged(family: str) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    generate(model, prompt(20), cache)
    ledger = cache.ledger()
    rows = sum(keys.numel() + values.numel() for keys, values, _ in held(cache).values())
    assert ledger.foreign_bytes >= 4 * rows > 0
    assert ledger.declared_bytes == ledger.measured_bytes
    assert ledger.payload_rows == 2 * 2 * 13


@pytest.mark.proves("saved", policy="snapkv")
@pytest.mark.parametrize("fed", [4, 20])
def test_saved_and_loaded(family: str, fed: int, tmp_path: Path) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    greedy_loop(model, prompt(fed), cache, 3)
    cache.save_pretrained(tmp_path)
    loaded = kv.load_cache(tmp_path, model)
    assert_held(loaded, held(cache), atol=0)
    with torch.no_grad():
        found, wanted = (forward(model, prompt(3, seed=6), each) for each in (loaded, cache))
    assert torch.equal(found, wanted)


def test_a_held_prompt_with_sinks_or_caps_is_saved(tmp_path: Path) -> None:
    model = tiny("gpt_oss")
    cache = kv.SnapKVCache(model, **SMALL, chunked_prefill="hold")
    with torch.no_grad():
        forward(model, prompt(20), cache)
        cache.save_pretrained(tmp_path)
        loaded = kv.load_cache(tmp_path, model)
        for each in (cache, loaded):
            forward(model, prompt(1), each)
    assert_same_content(loaded, cache, atol=0)


@pytest.mark.proves("offloaded", policy="snapkv")
def test_offloading_moves_the_policys_layers(family: str) -> None:
    model = tiny(family)
    cache, stays = (kv.SnapKVCache(model, **SMALL) for _ in range(2))
    for each in (cache, stays):
        generate(model, prompt(20), each)
    for layer in range(len(cache.layers)):
        cache.offload(layer)
    assert torch.equal(generate(model, prompt(30), cache), generate(model, prompt(30), stays))


@pytest.mark.proves("any", policy="pyramidinfer", refused=True)
@pytest.mark.parametrize("family", MIXED)
def test_a_policy_that_drops_tokens_between_layers_is_refused(family: str) -> None:
    with pytest.raises(kv.UnsupportedModelError, match="pyramidinfer drops tokens between layers"):
        kv.PyramidInferCache(tiny(family), budget=8)


def test_a_model_attached_for_another_cache_is_itself(family: str) -> None:
    model, twin = kv.attach(tiny(family)), tiny(family)
    stock = [dynamic_cache(each) for each in (model, twin)]
    assert torch.equal(generate(model, prompt(20), stock[0]), generate(twin, prompt(20), stock[1]))
    with torch.no_grad():
        assert torch.equal(model(prompt(9)).logits, twin(prompt(9)).logits)
    kv.detach(model)
    assert model.config._attn_implementation == twin.config._attn_implementation
    out = model.generate(prompt(9), max_new_tokens=3, do_sample=False)
    assert torch.equal(out, twin.generate(prompt(9), max_new_tokens=3, do_sample=False))
