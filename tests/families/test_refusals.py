"""What a family cannot do is refused by name, with its reason and a remedy, before anything is changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from helpers import VOCAB, forward, prompt
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

import hf_kvpolicy as kv

from ._table import config_of, require, tiny

# Kinds of models by their own default config, and why they are refused.
REASONS = {
    "deepseek_v3": "latent of its own.*kv_lora_rank",
    "minicpm3": "latent of its own.*kv_lora_rank",
    "gemma3n_text": "shares keys and values between layers",
    "deepseek_v4": "layers of kind compressed_sparse_attention",
    "mamba": "only layers of kind linear_attention, which keep no rows",
    "paligemma": "wraps a text decoder .'gemma'.*one another in both directions",
    "voxtral": "wraps a text decoder .'llama'.*has no patch.*AutoModelForCausalLM",
    "t5": "encoder-decoder",
    "cohere": "is not supported",
}


@pytest.mark.parametrize("kind", REASONS)
def test_kinds_no_policy_serves(kind: str) -> None:
    if kind not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind} models")
    with pytest.raises(kv.UnsupportedModelError, match=rf"'{kind}'.*{REASONS[kind]}.*Supported families: .*gpt_oss"):
        kv.FullCache(CONFIG_MAPPING[kind]())


@pytest.mark.parametrize(
    ("family", "changed", "words"),
    [
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn=False"),
        ("gpt2", {"add_cross_attention": True}, "without cross-attention"),
        ("llama4", {"layer_types": ["chunked_attention"] * 4}, "chunks of 7 tokens in every layer.*no later chunk"),
        ("gemma3", {"use_bidirectional_attention": True}, "attends in both directions"),
    ],
)
def test_configs_outside_a_family(family: str, changed: dict[str, Any], words: str) -> None:
    config = config_of(family, **changed)
    with pytest.raises(kv.UnsupportedModelError, match=words):
        kv.SnapKVCache(config, budget=64)
    model = require(family).classes[1](config)
    with pytest.raises(kv.UnsupportedModelError, match=words):
        kv.attach(model)
    assert model.config._attn_implementation in ("sdpa", "eager")


@pytest.mark.parametrize("varied", [{"num_key_value_heads": 1}, {"head_dim": 16, "intermediate_size": 24}])
def test_layers_of_different_shapes(varied: dict[str, int]) -> None:
    config = config_of("llama-llama3", per_layer_config={0: varied})
    with pytest.raises(kv.UnsupportedModelError, match=rf"differ in {next(iter(varied))} .per_layer_config"):
        kv.SnapKVCache(config, budget=64)
    kv.SnapKVCache(config_of("llama-llama3", per_layer_config={0: {"intermediate_size": 24}}), budget=64)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_backend_that_would_ignore_caps_or_sinks(family: str) -> None:
    """Where transformers knows it, at once; where a model runs under sdpa all the same, in its first forward."""
    model = tiny(family)
    cache = kv.SnapKVCache(model.config, budget=64)

    @torch.no_grad()
    def run_under_sdpa() -> None:
        kv.attach(model, backend="sdpa")
        forward(model, prompt(9), cache)

    with pytest.raises(kv.BackendAdmissionError, match=r'backend="eager"'):
        run_under_sdpa()
    assert cache.get_seq_length() == 0
    kv.detach(model)
    kv.attach(model, backend="eager")
    with torch.no_grad():
        forward(model, prompt(9), cache)
    assert cache.get_seq_length() == 9


@pytest.mark.proves("any", policy="pyramidinfer", family="gpt2", refused=True)
@pytest.mark.proves("cache_local", policy="streaming_llm", family="opt", refused=True)
@pytest.mark.proves("cache_local", policy="streaming_llm", family="gpt2", refused=True)
def test_what_a_family_gives_up_is_named() -> None:
    with pytest.raises(kv.UnsupportedModelError, match="returns as many positions as it was given"):
        kv.PyramidInferCache(tiny("gpt2"), budget=8)
    for family in ("opt", "gpt2"):
        with pytest.raises(kv.UnsupportedModelError, match="Use positions='original'"):
            kv.StreamingLLMCache(tiny(family), budget=8)
        kv.StreamingLLMCache(tiny(family), budget=8, positions="original")


def test_linear_attention_without_a_patch_is_not_guessed() -> None:
    config = CONFIG_MAPPING["minimax"](
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        layer_types=["linear_attention", "full_attention"],
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(kv.UnsupportedModelError, match=r"'minimax'.*cannot be checked from outside.*qwen3_next"):
        kv.SnapKVCache(model, budget=8, window=3)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_a_text_decoder_of_a_wrapper_is_served_alone() -> None:
    config = CONFIG_MAPPING["gemma3"](text_config=config_of("gemma3").to_dict())
    model = AutoModelForCausalLM.from_config(config.get_text_config(decoder=True)).eval()
    cache = kv.SnapKVCache(model, budget=8, window=3)
    with torch.no_grad():
        forward(model, prompt(20), cache)
    assert cache.stored_rows(1).tolist() == [[8, 8]]
