"""Families without a patch are checked on the loaded model: served as they are, or refused with what was found."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers import (
    CACHE,
    TINY_DECODER,
    VOCAB,
    WINDOW_TOKENS,
    dynamic_cache,
    forward,
    generate,
    left_padded,
    neutral_cache,
    prompt,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.attach import attached_backend

from ._odd import ODDITIES, odd
from ._reference import MaskedReference

# What is checked has, between them: parallel blocks, sliding and full layers with and without rotation, scales of its
# own, biases, partial rotation.
UNKNOWN: dict[str, dict[str, Any]] = {
    "cohere2": {"sliding_window": WINDOW_TOKENS, "num_key_value_heads": 2},
    "granite": {"attention_multiplier": 0.4, "num_key_value_heads": 2},
    "starcoder2": {"num_key_value_heads": 2, "sliding_window": None},
    "phi": {"partial_rotary_factor": 0.5},
    "modernbert-decoder": {"local_attention": 2 * WINDOW_TOKENS, "global_attn_every_n_layers": 2, "cls_token_id": 1},
}


def unknown(kind: str, backend: str = "sdpa", *, seed: int = 0, hidden: int = 32) -> Any:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind} models")
    torch.manual_seed(seed)
    config = CONFIG_MAPPING[kind](
        vocab_size=VOCAB,
        hidden_size=hidden,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=None,
        initializer_range=0.2,
        **UNKNOWN[kind],
    )
    model: Any = AutoModelForCausalLM.from_config(config, attn_implementation=backend).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("kind", UNKNOWN)
def test_what_passes_is_served(kind: str) -> None:
    model, twin = unknown(kind), unknown(kind)
    ids, mask = left_padded([prompt(n, seed=n) for n in (19, 12)])
    cache = neutral_cache("snapkv", model, 64)
    expected = generate(twin, ids, dynamic_cache(twin), 4, attention_mask=mask)
    assert torch.equal(generate(model, ids, cache, 4, attention_mask=mask), expected)
    assert cache.manifest.selection_contract.options["model_family"] == "probed"
    with pytest.raises(kv.UnsupportedModelError, match=r"not known.*positions='original'"):
        kv.StreamingLLMCache(model, budget=8)
    small, reference = kv.SnapKVCache(model, budget=8, window=3), MaskedReference(unknown(kind, "eager"))
    with torch.no_grad():
        reference.feed(prompt(20))
        forward(model, prompt(20), small)
        for step in range(3):
            reference.seen = {
                layer: [[owner.tolist() for owner in small.positions(layer)]] for layer in small.policy_layers
            }
            piece = prompt(1, seed=step)
            torch.testing.assert_close(forward(model, piece, small), reference.feed(piece), atol=2e-5, rtol=0)


def test_a_class_and_config_are_checked_once_on_a_model_that_stays_as_it_was() -> None:
    model, again, other = unknown("granite", hidden=48), unknown("granite", hidden=48, seed=1), unknown("granite")
    calls = []
    for each in (model, again, other):
        each.model.register_forward_pre_hook(lambda *_: calls.append(1))
    before = [(sorted(vars(module)), dict(module._forward_hooks)) for module in model.modules()]
    kv.attach(model)
    assert len(calls) == 3
    assert attached_backend(model) == "sdpa"
    kv.detach(model)
    assert model.config._attn_implementation == "sdpa"
    # transformers hooks every layer to return attention weights, which only the check asked for.
    assert [(sorted(vars(module)), dict(module._forward_hooks)) for module in model.modules()] == before
    model.set_attn_implementation("eager")
    with torch.no_grad():
        assert len(model(prompt(5), output_attentions=True).attentions) == 4
    calls.clear()
    kv.attach(again)
    assert not calls
    # A cache from the config alone is served once a model of it was checked.
    assert kv.SnapKVCache(model.config, budget=64).policy_layers == (0, 1, 2, 3)


@pytest.mark.parametrize("oddity", ODDITIES)
def test_what_does_not_pass_is_refused_with_the_finding(oddity: str) -> None:
    model = odd(oddity)
    before = model.config._attn_implementation
    with pytest.raises(
        kv.UnsupportedModelError, match=rf"'odd_llama' is not supported.*{ODDITIES[oddity]}.*Supported families.*llama"
    ):
        kv.SnapKVCache(model, budget=8, window=3)
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())
    with torch.no_grad():
        assert model(prompt(5)).logits.isfinite().all()


def test_an_odd_model_without_an_oddity_passes() -> None:
    kv.SnapKVCache(odd(""), budget=8, window=3)


def test_a_model_in_training_is_checked_later() -> None:
    model = unknown("phi", hidden=64).train()
    with pytest.raises(kv.UnsupportedModelError, match=r"call model.eval\(\)"):
        kv.attach(model)
    kv.attach(model.eval())


def test_the_check_can_be_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOLICY_PROBE", "0")
    model = odd("louder")
    model.config.rms_norm_eps = 1e-5  # a config of its own: what is remembered must not meet other tests
    with pytest.warns(UserWarning, match="KVPOLICY_PROBE=0.*unproven"):
        cache = kv.SnapKVCache(model, budget=8, window=3)
    with torch.no_grad():
        forward(model, prompt(20), cache)
    assert cache.manifest.selection_contract.options["model_family"] == "unproven"


def test_a_skipped_check_is_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPOLICY_PROBE", "0")
    models = []
    for model in (odd("louder"), unknown("granite", hidden=72)):
        model.config.rms_norm_eps = 3e-5
        with pytest.warns(UserWarning, match="unproven"):
            kv.attach(model)
        kv.SnapKVCache(model.config, budget=8, window=3)
        models.append(model)
    monkeypatch.delenv("KVPOLICY_PROBE")
    for model in models:
        with pytest.raises(kv.UnsupportedModelError, match="give the model instead of its config"):
            kv.SnapKVCache(model.config, budget=8, window=3)
    with pytest.raises(kv.UnsupportedModelError, match="something else than weights times values"):
        kv.attach(models[0])
    assert proof_of(kv.SnapKVCache(models[1], budget=8, window=3), models[1]) == "probed"
    monkeypatch.setenv("KVPOLICY_PROBE", "0")
    assert proof_of(kv.SnapKVCache(models[1], budget=8, window=3), models[1]) == "probed"


def proof_of(cache: Any, model: Any) -> str:
    with torch.no_grad():
        forward(model, prompt(20), cache)
    return str(cache.manifest.selection_contract.options["model_family"])


def chameleon() -> Any:
    """Return a tiny model whose config is that of its text decoder, and which takes images all the same."""
    vision = {"embed_dim": 32, "num_embeddings": 16, "latent_channels": 32, "resolution": 16, "base_channels": 32}
    vision |= {"channel_multiplier": [1, 1], "num_res_blocks": 1}
    pieces = {f"IMGIMG{letter}Z": 10 + number for number, letter in enumerate("ABCDEFGHIJ")}
    pieces |= {f"IMGIMGB{letter}Z": 20 + number for number, letter in enumerate("ABCDEF")}
    torch.manual_seed(0)
    config = transformers.ChameleonConfig(
        **TINY_DECODER, vq_config=vision, vocabulary_map={"<image>": 90, **pieces}, attn_implementation="sdpa"
    )
    model = transformers.ChameleonForConditionalGeneration(config).eval()
    model.model.vqmodel.config._attn_implementation = "eager"
    return model


def test_a_model_checked_on_text_serves_text_alone() -> None:
    model = chameleon()
    cache = kv.SnapKVCache(model, budget=8, window=3)
    assert model.model.vqmodel.config._attn_implementation == "eager"
    ids = prompt(80) % 9 + 1
    ids[:, 2:66] = 90
    for given in ({"pixel_values": torch.randn(1, 3, 16, 16)}, {"pixel_values": [torch.randn(3, 16, 16)]}):
        with pytest.raises(kv.UnsupportedModelError, match=r"brings pixel_values.*was checked on text alone"):
            forward(model, ids, cache, **given)
        assert cache.get_seq_length() == 0
        with pytest.raises(kv.UnsupportedModelError, match="brings pixel_values"), torch.no_grad():
            model.model(ids, **{CACHE: cache}, **given)
    with torch.no_grad():
        model(ids, **given | {"pixel_values": torch.randn(1, 3, 16, 16)})  # without a policy cache it may
        forward(model, prompt(20), cache)
    assert cache.stored_rows(0).tolist() == [[8, 8]]
    kv.detach(model)
    assert model.config._attn_implementation == "sdpa"
    assert model.model.vqmodel.config._attn_implementation == "eager"


def test_a_saved_cache_is_loaded_where_its_family_was_not_checked_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = unknown("granite", hidden=80)
    cache = kv.SnapKVCache(model, budget=8, window=3)
    with torch.no_grad():
        forward(model, prompt(20), cache)
    cache.save_pretrained(tmp_path)
    for module, name in (("hf_kvpolicy.attach", "_CHECKED"), ("hf_kvpolicy.registry", "_PROBED")):
        monkeypatch.setattr(sys.modules[module], name, {})
    again = kv.load_cache(tmp_path, kv.detach(model))
    assert proof_of(again, model) == "probed"


def test_a_config_alone_cannot_be_checked() -> None:
    with pytest.raises(kv.UnsupportedModelError, match="give the model instead of its config"):
        kv.SnapKVCache(unknown("starcoder2", hidden=40).config, budget=64)


def test_a_config_that_is_changed_later_does_not_keep_a_model_attached() -> None:
    model = kv.attach(unknown("granite", hidden=56))
    model.config.pad_token_id = 5
    kv.detach(model)
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks


def test_a_family_that_drops_its_cache_at_a_length_is_watched() -> None:
    limit = 24
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope |= {"short_mscale": 1.0, "long_mscale": 1.0, "original_max_position_embeddings": limit, "factor": 4.0}
    options = {**TINY_DECODER, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": rope}
    config = transformers.PhimoeConfig(**options, original_max_position_embeddings=limit)
    model = transformers.PhimoeForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    cache = kv.SnapKVCache(model, budget=8, window=3)
    with pytest.raises(kv.ConfigError, match=r"original_max_position_embeddings.*without the policy"):
        generate(model, prompt(limit - 4), cache, 10)
    assert cache.get_seq_length() == limit
    kv.detach(model)
    assert "prepare_inputs_for_generation" not in vars(model)
