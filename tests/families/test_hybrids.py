"""Models of linear attention beside full attention: the policy acts on rows, states are transformers' own."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_same_content,
    dynamic_cache,
    forward,
    generate,
    greedy_loop,
    neutral_cache,
    prompt,
)

import hf_kvpolicy as kv
from hf_kvpolicy.replay import can_replay

from ._table import HYBRIDS, foreign_content, tiny

SMALL: dict[str, Any] = {"budget": 8, "window": 3, "kernel_size": 3}
# A forward ends with linear attention in the first, in the second every layer has both, the third has convolutions
# alone, the fourth a layer without any of them.
SHAPES = ("qwen3_next", "falcon_h1", "lfm2", "nemotron_h")

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


@pytest.fixture(params=SHAPES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def states(cache: Any) -> dict[int, dict[str, torch.Tensor]]:
    """What layers with linear attention hold."""
    return {i: foreign_content(layer) for i, layer in enumerate(cache.layers) if hasattr(layer, "conv_states")}


def assert_states(cache: Any, wanted: dict[int, dict[str, torch.Tensor]], atol: float = 0.0) -> None:
    found = states(cache)
    # Before 5.24 transformers gave layers of neither kind states, which stay empty.
    assert found.keys() == {layer for layer, parts in wanted.items() if parts}
    for layer, parts in found.items():
        assert parts.keys() == wanted[layer].keys()
        for name, part in parts.items():
            torch.testing.assert_close(part, wanted[layer][name], atol=atol, rtol=0)


def has_recurrence(model: Any) -> bool:
    return model.config.model_type != "lfm2"


@pytest.mark.parametrize("family", [name for name in HYBRIDS if name != "falcon_h1"])
def test_first_states_are_bit_for_bit_those_without_a_policy(family: str) -> None:
    """They depend on tokens alone, so eviction in later layers must not change a bit of them."""
    model, twin = tiny(family), tiny(family)
    cache, stock = kv.SnapKVCache(model, **SMALL), dynamic_cache(twin)
    talk = generate(model, prompt(20), cache)
    for start, piece in [(0, talk[:, :20]), *((20 + i, talk[:, 20 + i : 21 + i]) for i in range(talk.shape[1] - 21))]:
        with torch.no_grad():
            forward(twin, piece, stock, position_ids=torch.arange(start, start + piece.shape[1])[None])
    assert cache.policy_layers[0] == 1
    found = foreign_content(cache.layers[0])
    assert found.keys() == foreign_content(stock.layers[0]).keys() != set()
    for name, part in foreign_content(stock.layers[0]).items():
        assert torch.equal(found[name], part)


def test_layers_are_named_by_the_models_numbers(family: str) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    generate(model, prompt(20), cache)
    kinds = model.config.layer_types
    assert cache.policy_layers == tuple(i for i, kind in enumerate(kinds) if kind in ("full_attention", "hybrid"))
    assert cache.is_linear == [kind in ("linear_attention", "conv", "moe") for kind in kinds]
    assert len(cache.layers) == len(kinds)
    for layer in range(len(kinds)):
        if layer in cache.policy_layers:
            assert cache.stored_rows(layer).tolist() == [[8 + 5] * 2]
        else:
            with pytest.raises(kv.ConfigError, match="does not act on layer"):
                cache.positions(layer)
        for call in (lambda at=layer: cache.layers[at].crop(0), lambda at=layer: cache.layers[at].reorder_cache([0])):
            with pytest.raises(kv.ConfigError, match="alone"):
                call()


class Died(Exception):
    """Raised on purpose inside a forward."""


@pytest.mark.proves("failures", policy="snapkv")
@pytest.mark.parametrize("place", [0, 1, 2, 3, "norm", "lm_head"])
@pytest.mark.parametrize("length", [1, 5])
def test_a_forward_that_dies_leaves_no_trace(family: str, place: Any, length: int) -> None:
    """The decoder's return publishes; whatever fails before it, states that were written in place are as they were."""
    model = tiny(family)
    cache, calm = (kv.SnapKVCache(model, **SMALL) for _ in range(2))
    for each in (cache, calm):
        generate(model, prompt(20), each)
    before, receipt = states(cache), cache.receipt

    def die(*_: Any) -> None:
        raise Died

    decoder = model.get_decoder()
    norms = ("norm", "norm_f", "final_layernorm", "embedding_norm")
    ends = {"norm": next(getattr(decoder, name) for name in norms if hasattr(decoder, name)), "lm_head": model.lm_head}
    handle = (
        decoder.layers[place].register_forward_hook(die)
        if isinstance(place, int)
        else ends[place].register_forward_pre_hook(die)
    )
    with pytest.raises(Died), torch.no_grad():
        forward(model, prompt(length, seed=3), cache)
    handle.remove()
    if place == "lm_head":
        with torch.no_grad():
            forward(model, prompt(length, seed=3), calm)
    else:
        cache.rollback()
        assert cache.receipt == receipt
        assert_states(cache, before)
    with torch.no_grad():
        found, wanted = (forward(model, prompt(2, seed=4), each) for each in (cache, calm))
    assert torch.equal(found, wanted)
    assert_same_content(cache, calm, atol=0)
    assert_states(cache, states(calm))


def test_an_unattached_model_changes_nothing(family: str) -> None:
    model, other = tiny(family), tiny(family)
    cache, calm = (kv.SnapKVCache(model, **SMALL) for _ in range(2))
    for each in (cache, calm):
        generate(model, prompt(20), each)
    before = states(cache)
    for length in (1, 4):
        with pytest.raises(kv.ConfigError, match="attach"), torch.no_grad():
            forward(other, prompt(length), cache)
    assert_states(cache, before)
    with torch.no_grad():
        assert torch.equal(*(forward(model, prompt(2, seed=4), each) for each in (cache, calm)))


def test_states_that_are_read_are_copies(family: str) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    with torch.no_grad():
        forward(model, prompt(9), cache)
    before = states(cache)
    for parts in states(cache).values():
        for part in parts.values():
            part.fill_(7.0)
    assert_states(cache, before)


def test_copies_forks_and_branches_do_not_touch_one_another(family: str) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    generate(model, prompt(20), cache)
    before = states(cache)
    twin, copied = cache.fork(), copy.deepcopy(cache)
    with cache.branch(), torch.no_grad():
        branched = forward(model, prompt(4, seed=2), cache)
    with torch.no_grad():
        assert torch.equal(forward(model, prompt(4, seed=2), twin), branched)
    assert_states(cache, before)
    assert_states(copied, before)
    with torch.no_grad():
        assert torch.equal(forward(model, prompt(4, seed=2), copied), branched)
    cache.reset()
    assert not any(states(cache).values())
    again = kv.SnapKVCache(model, **SMALL)
    assert torch.equal(generate(model, prompt(9), cache), generate(model, prompt(9), again))


def test_batch_rows_are_selected_and_repeated(family: str) -> None:
    model = tiny(family)
    cache, ids = neutral_cache("snapkv", model, 64), prompt(12, rows=3)
    order = [1, 1, 2, 2]
    with torch.no_grad():
        forward(model, ids, cache)
        cache.batch_select_indices(torch.tensor([2, 1]))
        cache.batch_repeat_interleave(2)
        cache.reorder_cache(torch.tensor([3, 2, 1, 0]))
        forward(model, ids[order][:, :1], cache)
        straight = neutral_cache("snapkv", model, 64)
        forward(model, ids[order], straight)
        forward(model, ids[order][:, :1], straight)
    assert_states(cache, states(straight), atol=1e-5)
    cache.check_integrity()


@pytest.mark.parametrize("fed", [1, 2, 12])
def test_convolutions_are_taken_back(fed: int) -> None:
    model, twin = tiny("lfm2"), tiny("lfm2")
    cache, straight = (neutral_cache("snapkv", model, 64) for _ in range(2))
    ids = prompt(fed + 5)
    with torch.no_grad():
        forward(model, ids[:, :fed], straight)
        forward(model, ids[:, :fed], cache)
        cache.activate_past_recording()
        forward(model, ids[:, fed:], cache)
        cache.crop(-3)
        forward(model, ids[:, fed + 2 : fed + 3], cache)
        cache.crop(0)
        for at in range(fed, fed + 3):
            forward(model, ids[:, at : at + 1], straight)
        cache.set_recording(False)
        found, wanted = (forward(model, prompt(2), each) for each in (cache, straight))
        stock = dynamic_cache(twin)
        for piece in (ids[:, : fed + 3], prompt(2)):
            forward(twin, piece, stock)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)
    assert_states(cache, states(straight), atol=1e-5)
    assert_states(cache, states(stock), atol=1e-5)


def test_a_recurrence_is_not_taken_back() -> None:
    model = tiny("qwen3_next")
    cache = neutral_cache("snapkv", model, 64)
    with torch.no_grad():
        forward(model, prompt(12), cache)
        before = states(cache)
        with pytest.raises(kv.StaleGenerationError, match=r"one recurrent state.*assisted decoding"):
            cache.crop(-2)
        assert cache.get_seq_length() == 12
        cache.activate_past_recording()
        forward(model, prompt(3), cache)
        with pytest.raises(kv.StaleGenerationError, match="one recurrent state"):
            cache.crop(-1)
        # All that waits, or nothing of it, can be told: the state before it is still there.
        cache.crop(-3)
        assert_states(cache, before)
        forward(model, prompt(3), cache)
        cache.crop(0)
    assert cache.get_seq_length() == 15
    cache.check_integrity()
    cache.crop(-15)
    assert not any(states(cache).values())


def test_convolutions_that_were_let_go_of_are_not_taken_back() -> None:
    model = tiny("lfm2")
    cache = neutral_cache("snapkv", model, 64)
    with torch.no_grad():
        forward(model, prompt(12), cache)
    with pytest.raises(kv.StaleGenerationError, match=r"last 3 inputs.*activate_past_recording"):
        cache.crop(-2)
    assert cache.get_seq_length() == 12


@pytest.mark.proves("parity_assisted", policy="snapkv", family="lfm2")
@pytest.mark.allow_deprecated  # transformers' own candidate generator passes a generation_config and arguments
def test_prompt_lookup_with_convolutions() -> None:
    ids = torch.cat([prompt(9), prompt(9)], dim=1)
    answers = []
    for neutral in (False, True):
        model = tiny("lfm2")
        cache = neutral_cache("snapkv", model, 64) if neutral else dynamic_cache(model)
        answers.append(generate(model, ids, cache, 10, prompt_lookup_num_tokens=3))
    assert torch.equal(*answers)


@pytest.mark.proves("parity_assisted", policy="snapkv", family="qwen3_next", refused=True)
@pytest.mark.allow_deprecated
def test_prompt_lookup_with_a_recurrence_is_refused() -> None:
    model = tiny("qwen3_next")
    with pytest.raises((ValueError, kv.StaleGenerationError)):
        generate(model, prompt(9), neutral_cache("snapkv", model, 64), 10, prompt_lookup_num_tokens=3)


def test_chunks_that_are_held_are_selected_from_as_one_prompt(family: str) -> None:
    model = tiny(family)
    whole, chunked = kv.SnapKVCache(model, **SMALL), kv.SnapKVCache(model, **SMALL, chunked_prefill="hold")
    ids = prompt(20)
    with torch.no_grad():
        forward(model, ids, whole)
        for piece in ids.split(6, dim=1):
            forward(model, piece, chunked)
        chunked.finish_prefill()
    # A recurrence computes chunks in another order, with transformers' own cache too.
    assert_same_content(chunked, whole, atol=1e-4)
    assert_states(chunked, states(whole), atol=1e-4)


def test_bytes_of_states_are_charged(family: str) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    generate(model, prompt(20), cache)
    ledger = cache.ledger()
    assert ledger.foreign_bytes == sum(4 * part.numel() for parts in states(cache).values() for part in parts.values())
    assert ledger.declared_bytes == ledger.measured_bytes
    assert ledger.payload_rows == len(cache.policy_layers) * 2 * 13


@pytest.mark.proves("saved", policy="snapkv")
@pytest.mark.parametrize("fed", [1, 20])
def test_saved_and_loaded(family: str, fed: int, tmp_path: Path) -> None:
    model = tiny(family)
    cache = kv.SnapKVCache(model, **SMALL)
    greedy_loop(model, prompt(fed), cache, 3)
    cache.save_pretrained(tmp_path)
    loaded = kv.load_cache(tmp_path, model)
    assert_states(loaded, states(cache))
    with torch.no_grad():
        found, wanted = (forward(model, prompt(3, seed=6), each) for each in (loaded, cache))
    assert torch.equal(found, wanted)
    assert_states(loaded, states(cache))


@pytest.mark.proves("offloaded", policy="snapkv")
def test_offloading_moves_the_policys_layers(family: str) -> None:
    model = tiny(family)
    cache, stays = (kv.SnapKVCache(model, **SMALL) for _ in range(2))
    for each in (cache, stays):
        generate(model, prompt(20), each)
    for layer in range(len(cache.layers)):
        cache.offload(layer)
    for layer in range(len(cache.layers)):
        cache.prefetch(layer)
    assert torch.equal(generate(model, prompt(30), cache), generate(model, prompt(30), stays))


@pytest.mark.proves("any", policy="pyramidinfer", refused=True)
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_policy_that_drops_tokens_between_layers_is_refused(family: str) -> None:
    with pytest.raises(kv.UnsupportedModelError, match="pyramidinfer drops tokens between layers"):
        kv.PyramidInferCache(tiny(family), budget=8)


def test_prompts_are_not_captured(family: str) -> None:
    assert not can_replay(kv.SnapKVCache(tiny(family), **SMALL))


def test_a_model_attached_for_another_cache_is_itself(family: str) -> None:
    model, twin = kv.attach(tiny(family)), tiny(family)
    kv.attach(model)
    assert len(model.get_decoder()._forward_hooks) == 1
    stock = [dynamic_cache(each) for each in (model, twin)]
    assert torch.equal(generate(model, prompt(20), stock[0]), generate(twin, prompt(20), stock[1]))
    kv.detach(model)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == twin.config._attn_implementation
    out = model.generate(prompt(9), max_new_tokens=3, do_sample=False)
    assert torch.equal(out, twin.generate(prompt(9), max_new_tokens=3, do_sample=False))


def test_a_forward_that_runs_part_of_its_layers_is_refused() -> None:
    model = tiny("qwen3_next")
    cache = neutral_cache("snapkv", model, 64)
    last = model.model.layers[2]
    last.forward = lambda hidden, **_: hidden
    with pytest.raises(kv.IntegrityError, match="before 1 of its attention layers"), torch.no_grad():
        forward(model, prompt(5), cache)
    del last.forward
    with torch.no_grad():
        forward(model, prompt(5), cache)
    assert cache.get_seq_length() == 5
