"""Forwards bound on a model's own modules: what attach leaves, what detach takes away, and what is refused."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from helpers import (
    CACHE,
    assert_same_content,
    case_id,
    dynamic_cache,
    forward,
    generate,
    greedy_loop,
    prompt,
    small_options,
)
from transformers import BloomConfig

import hf_kvpolicy as kv
from hf_kvpolicy.replay import can_replay
from hf_kvpolicy.storage import DenseRows

from ._alibi_models import KINDS, MODELS, attached, backends_of, model_of


def own_state(model: Any) -> list[tuple[str, type, list[str], Any, int]]:
    """Return what could tell a model that was attached from one that was not."""
    return [
        (name, type(module), sorted(module.__dict__), type(module).forward, len(module._forward_pre_hooks))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("name", MODELS)
def test_detach_restores_the_instance(name: str) -> None:
    model, ids = model_of(name), prompt(19, rows=2)
    before, config = own_state(model), model.config.to_dict()
    wanted = greedy_loop(model, ids, dynamic_cache(model), 4)
    kv.attach(model)
    assert kv.attached_backend(model) == "sdpa" or not name.startswith("falcon")
    generate(model, ids, kv.make_cache("pyramidinfer", model, **small_options("pyramidinfer")))
    assert own_state(model) != before
    kv.detach(kv.detach(model))
    assert own_state(model) == before
    assert model.config.to_dict() == config
    assert kv.attached_backend(model) is None
    assert all(
        torch.equal(*pair) for pair in zip(greedy_loop(model, ids, dynamic_cache(model), 4), wanted, strict=True)
    )
    with pytest.raises(kv.ConfigError, match="attach"):
        forward(model, ids, kv.FullCache(model.config))


@pytest.mark.parametrize("name", MODELS)
def test_another_cache_runs_the_classes_own_forward(name: str) -> None:
    stock, ids = model_of(name), prompt(19, rows=2)
    model = kv.attach(model_of(name))
    for cache in (True, False):
        with torch.no_grad():
            pairs = [m(ids, use_cache=cache).logits for m in (stock, model)]
        assert torch.equal(*pairs)
    wanted = greedy_loop(stock, ids, dynamic_cache(stock), 4)
    assert all(torch.equal(*p) for p in zip(greedy_loop(model, ids, dynamic_cache(model), 4), wanted, strict=True))


@pytest.mark.parametrize("name", KINDS)
def test_copies_carry_their_own_binding(name: str) -> None:
    model, ids = attached(name), prompt(19)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        next(twin.parameters()).mul_(1.5)
    outputs = [generate(m, ids, kv.SnapKVCache(m, budget=8, window=3)) for m in (model, twin)]
    kv.detach(model)
    assert torch.equal(generate(twin, ids, kv.SnapKVCache(twin, budget=8, window=3)), outputs[1])
    assert kv.attached_backend(model) is None
    assert kv.attached_backend(twin) == "sdpa"


def test_a_detached_model_is_collected() -> None:
    model = kv.detach(attached("mpt"))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", KINDS)
def test_hooks_that_wrap_forwards_stay(name: str) -> None:
    """accelerate replaces forwards on instances and calls what it found; attach serves what it calls."""
    model, calls = model_of(name), list[int]()

    def wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return module._old_forward(*args, **kwargs)

    modules = [m for m in model.modules() if hasattr(m, "layer_idx")]
    for module in modules:
        module._old_forward = module.forward
        module.forward = MethodType(wrapped, module)
    before, ids = own_state(model), prompt(19)
    wanted = generate(model, ids, dynamic_cache(model))
    kv.attach(model, backend="sdpa")
    calls.clear()
    assert torch.equal(generate(model, ids, kv.FullCache(model)), wanted)
    assert calls
    kv.detach(model)
    assert own_state(model) == before
    assert torch.equal(generate(model, ids, dynamic_cache(model)), wanted)


def test_a_forward_that_somebody_replaced() -> None:
    model = model_of("mpt")
    block = model.transformer.blocks[1].attn
    block.forward = MethodType(type(block).forward, block)
    with pytest.raises(kv.UnsupportedModelError, match="replaced on the instance"):
        kv.attach(model)
    assert "forward" not in model.transformer.blocks[0].attn.__dict__, "all modules are bound, or none"
    assert not model._forward_pre_hooks
    assert kv.attached_backend(model) is None


@pytest.mark.parametrize("name", KINDS)
def test_backends_without_the_bias(name: str) -> None:
    for backend in ("flex_attention", *({"sdpa", "eager"} - set(backends_of(name)))):
        with pytest.raises(kv.BackendAdmissionError, match='backend="sdpa"'):
            kv.attach(model_of(name), backend=backend)


def test_falcon_with_alibi_adds_its_bias_twice_in_eager_mode() -> None:
    """Why that backend is refused; once transformers adds it once, this fails and the refusal can go."""
    ids = prompt(19)
    with torch.no_grad():
        eager, sdpa = (model_of("falcon_alibi", backend)(ids).logits for backend in ("eager", "sdpa"))
    assert (eager - sdpa).abs().max() > 1e-2
    with pytest.raises(kv.BackendAdmissionError, match="twice"):
        kv.attach(model_of("falcon_alibi", "eager"))


def test_mpt_without_use_cache() -> None:
    """MPT's own configuration turns the cache off, and transformers then feeds everything again."""
    model = attached("mpt")
    model.config.use_cache = False
    cache = kv.SnapKVCache(model, budget=8, window=3)
    with pytest.raises(kv.ConfigError, match="use_cache=True"):
        generate(model, prompt(19), cache, use_cache=False)
    with pytest.raises(kv.ConfigError, match="use_cache=True"):
        model(prompt(19), **{CACHE: cache})
    assert cache.get_seq_length() == 0
    generate(model, prompt(19), cache)


def test_bloom_with_a_split_projection() -> None:
    config = BloomConfig(vocab_size=97, hidden_size=32, n_head=4, pretraining_tp=2, slow_but_exact=True)
    with pytest.raises(kv.UnsupportedModelError, match="slow_but_exact = False"):
        kv.FullCache(config)


@pytest.mark.parametrize("name", ["falcon", "falcon_grouped"])
def test_falcon_stores_kv_heads_once(name: str) -> None:
    model = attached(name)
    cache = kv.FullCache(model)
    with torch.no_grad():
        forward(model, prompt(9), cache)
    heads = 1 if name == "falcon" else 2
    rows = cache._runtime.snapshot.rows[0]
    assert isinstance(rows, DenseRows)
    assert rows.keys_BSCD.shape[1] == heads == cache.geometry.num_kv_heads
    assert cache.ledger().payload_bytes == 2 * 2 * heads * 9 * 8 * 4
    cache.check_integrity()


SAVED: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("snapkv", "streaming_llm", "adakv")),
    ("snapkv", {"chunked_prefill": "hold"}),
]


@pytest.mark.proves("saved")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("case", SAVED, ids=case_id)
def test_saved_caches_go_on(name: str, case: tuple[str, dict[str, Any]], tmp_path: Path) -> None:
    model, ids = attached(name), prompt(24)
    policy, held = case
    cache = kv.make_cache(policy, model, **small_options(policy), **held)
    with torch.no_grad():
        for part in ids[:, :22].split([10, 12] if held else [20, 1, 1], dim=1):
            forward(model, part, cache)
    cache.save_pretrained(tmp_path / "saved")
    loaded = kv.load_cache(tmp_path / "saved", model)
    with torch.no_grad():
        pairs = [forward(model, ids[:, 22:23], c) for c in (cache, loaded)]
    assert torch.equal(*pairs)
    assert_same_content(cache, loaded, atol=0)
    stage = "post_rope" if name == "falcon_grouped" else "no_rope"
    assert cache.manifest.tensor_contract.key_position_stage == stage


@pytest.mark.parametrize("name", KINDS)
def test_prompts_are_not_replayed(name: str) -> None:
    assert not can_replay(kv.SnapKVCache(attached(name), budget=8, window=3))
