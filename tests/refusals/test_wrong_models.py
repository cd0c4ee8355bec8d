"""Models a cache cannot serve fail at once and name the remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families._models import model_of
from families._table import config_of
from helpers import (
    CACHE,
    assert_same_content,
    content,
    declared,
    forward,
    generate,
    prompt,
    tiny,
)
from refusals.started import ATTACH, Started, make
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import hf_kvpolicy as kv

# -- the wrong model


def test_not_attached(name: str) -> None:
    model = tiny("llama")
    cache = make(name, model.config)
    for call in (lambda: generate(model, prompt(9), cache), lambda: forward(model, prompt(9), cache)):
        with pytest.raises(kv.ConfigError, match=ATTACH):
            call()
    assert cache.get_seq_length() == 0
    kv.attach(model)
    assert torch.equal(generate(model, prompt(20), cache), generate(model, prompt(20), make(name, model)))


def test_detached(name: str) -> None:
    started = Started(name)
    kv.detach(started.model)
    with pytest.raises(kv.ConfigError, match=ATTACH), torch.no_grad():
        forward(started.model, prompt(1, rows=2), started.cache)
    kv.attach(started.model)
    started.goes_on()


class Died(Exception):
    """Raised on purpose inside a forward."""


@pytest.mark.parametrize("place", ["embedding", "first projection", "first mlp", "last mlp"])
@pytest.mark.parametrize("then", ["detached", "another model"])
def test_not_attached_after_a_forward_that_died(name: str, place: str, then: str) -> None:
    """What a dead forward left open must not let the next, unattached one in."""
    started = Started(name)
    model = started.model
    layers = model.model.layers
    module = {
        "embedding": model.model.embed_tokens,
        "first projection": layers[0].self_attn.q_proj,
        "first mlp": layers[0].mlp,
        "last mlp": layers[-1].mlp,
    }[place]
    seen = prompt(1, rows=2)
    published = place == "last mlp"

    def die(*_: Any) -> None:
        raise Died

    handle = module.register_forward_pre_hook(die)
    with pytest.raises(Died), torch.no_grad():
        forward(model, started.ids[:, 22:23], started.cache)
    handle.remove()
    other = tiny("llama", seed=5)
    if then == "detached":
        other = kv.detach(model)
    before = content(started.cache)
    with pytest.raises(kv.KVPolicyError, match=ATTACH + "|no longer the one in flight"), torch.no_grad():
        forward(other, seen, started.cache)
    after = content(started.cache)
    assert all(torch.equal(v, after[k]) if isinstance(v, torch.Tensor) else v == after[k] for k, v in before.items())
    kv.attach(model)
    if published:
        with torch.no_grad():
            forward(model, started.ids[:, 22:23], started.calm)
        for cache in started.caches:
            with torch.no_grad():
                forward(model, started.ids[:, 23:24], cache)
        assert_same_content(started.cache, started.calm, atol=0)
    else:
        started.goes_on()


def test_another_model(name: str) -> None:
    started = Started(name)
    same_shape = kv.attach(tiny("llama", seed=3))
    with started.refuses(kv.ConfigError, "another .*Make a cache for this model"):
        forward(same_shape, prompt(1, rows=2), started.cache)


def test_another_shape(name: str) -> None:
    cache = make(name, tiny("llama").config)
    for model in (tiny("llama", layers=3), tiny("llama_head_dim"), tiny("mistral")):
        kv.attach(model)
        with pytest.raises(kv.ConfigError, match="Make the cache from this model"):
            forward(model, prompt(9), cache)
    model = kv.attach(declared(tiny("llama"), name))
    assert torch.equal(generate(model, prompt(20), cache), generate(model, prompt(20), make(name, model)))


@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("gemma3", lambda: config_of("gemma3", sliding_window=4)),
        ("falcon_heads", lambda: model_of("falcon_alibi").config),
        ("falcon_alibi", lambda: model_of("falcon_heads").config),
    ],
)
def test_other_rules_at_the_same_shape(family: str, config: Callable[[], Any]) -> None:
    """A cache made from a config knows what foreign layers hold, and biases, before it meets its model."""
    model, cache = kv.attach(model_of(family)), kv.FullCache(config())
    with pytest.raises(kv.ConfigError, match=r"other sliding windows.*Make the cache from this model"):
        forward(model, prompt(20), cache)
    with torch.no_grad():
        forward(model, prompt(20), kv.FullCache(model.config))


def _unsupported() -> list[tuple[str, Callable[[], Any], str]]:
    return [
        ("gpt2", lambda: GPT2LMHeadModel(GPT2Config(vocab_size=97, n_embd=32, n_layer=2, n_head=4)), "not supported"),
        (
            "t5",
            lambda: T5ForConditionalGeneration(
                T5Config(vocab_size=97, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4)
            ),
            "encoder-decoder",
        ),
    ]


@pytest.mark.parametrize(("family", "build", "words"), _unsupported(), ids=[f for f, _, _ in _unsupported()])
def test_unsupported_families(family: str, build: Callable[[], Any], words: str) -> None:
    if family in kv.supported_model_types():
        pytest.skip(f"{family} has a patch now")
    model = build()
    implementation = model.config._attn_implementation
    for given in (model, model.config):
        with pytest.raises(kv.UnsupportedModelError, match=f"{family}.*{words}.*Supported families: .*llama"):
            kv.FullCache(given)
    with pytest.raises(kv.UnsupportedModelError, match=family):
        kv.attach(model)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_supported_cache_on_an_encoder_decoder_model(name: str) -> None:
    started = Started(name)
    _, build, _ = _unsupported()[-1]
    model = build().eval()
    with started.refuses(Exception, "."):
        model(prompt(4), decoder_input_ids=prompt(1), use_cache=True, **{CACHE: started.cache})


@pytest.mark.parametrize("given", [None, "llama", torch.nn.Linear(2, 2), 3])
def test_neither_model_nor_config(given: Any) -> None:
    with pytest.raises((kv.ConfigError, kv.UnsupportedModelError), match="transformers model"):
        kv.FullCache(given)
    if isinstance(given, torch.nn.Module):
        with pytest.raises(kv.UnsupportedModelError, match="from_pretrained"):
            kv.attach(given)


def test_a_backend_that_cannot_be_wrapped() -> None:
    model = tiny("llama")
    with pytest.raises(kv.BackendAdmissionError, match='backend="sdpa"'):
        kv.attach(model, backend="paged|sdpa")
    assert kv.attached_backend(model) is None
