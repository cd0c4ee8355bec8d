"""Tiny models whose attention is no function of transformers: MPT, Bloom, Falcon."""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from helpers import VOCAB
from transformers import BloomConfig, BloomForCausalLM, FalconConfig, FalconForCausalLM, MptConfig, MptForCausalLM

# 6 heads: slopes of no power of two. 12: slopes that bfloat16 does not hold.
ALIBI = ("mpt", "mpt_6_heads", "bloom", "bloom_6_heads", "falcon_alibi", "falcon_alibi_12_heads")
ROTARY = ("falcon", "falcon_grouped", "falcon_heads")
MODELS = (*ALIBI, *ROTARY)
# One of each kind, for what is slow.
KINDS = ("mpt_6_heads", "bloom", "falcon_alibi", "falcon_grouped")


def backends_of(name: str) -> tuple[str, ...]:
    return ("sdpa",) if name.startswith("falcon_alibi") else ("sdpa", "eager")


@lru_cache(maxsize=32)
def _master(name: str, backend: str, layers: int) -> Any:
    heads = next((int(word) for word in name.split("_") if word.isdigit()), 4)
    common: dict[str, Any] = {"vocab_size": VOCAB, "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    state = torch.random.get_rng_state()
    torch.manual_seed(7)
    try:
        if name.startswith("mpt"):
            attention = {"clip_qkv": 2.0, "softmax_scale": 0.4}
            sizes = {"d_model": 8 * heads, "n_heads": heads, "n_layers": layers, "max_seq_len": 256}
            model: Any = MptForCausalLM(
                MptConfig(**common, **sizes, attn_config=attention, initializer_range=0.3, use_cache=True)
            )
        elif name.startswith("bloom"):
            sizes = {"hidden_size": 8 * heads, "n_head": heads, "n_layer": layers}
            model = BloomForCausalLM(BloomConfig(**common, **sizes, initializer_range=0.3))
        else:
            sizes = {"hidden_size": 8 * heads, "num_attention_heads": heads, "num_hidden_layers": layers}
            config = FalconConfig(**common, **sizes, **_falcon(name), initializer_range=0.3)
            config._attn_implementation = backend
            model = FalconForCausalLM(config)
    finally:
        torch.random.set_rng_state(state)
    return model.eval()


def _falcon(name: str) -> dict[str, Any]:
    if "alibi" in name:
        return {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
    if name == "falcon_grouped":
        return {"new_decoder_architecture": True, "num_kv_heads": 2}
    return {"multi_query": name == "falcon"}


def model_of(name: str, backend: str = "sdpa", *, layers: int = 2) -> Any:
    """Return a fresh, unattached tiny random model without an end-of-sequence token."""
    with torch.inference_mode(False), torch.enable_grad():
        made = copy.deepcopy(_master(name, backend, layers))
    return made


def attached(name: str, backend: str = "sdpa", *, layers: int = 2) -> Any:
    """Return such a model, ready for policy caches over one backend."""
    import hf_kvpolicy as kv

    return kv.attach(model_of(name, backend, layers=layers), backend=backend)
