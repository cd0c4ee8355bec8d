"""One entry a family: a tiny random model with its real quirks switched on. Another family is another entry."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from helpers import TINY_DECODER, WINDOW_TOKENS

_SLIDING_AND_FULL = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


@dataclass(frozen=True)
class Family:
    """How to make a tiny model of a family, and what it has."""

    # Prefix of transformers' config class; the model class is `prefix + ForCausalLM` unless named.
    prefix: str
    options: dict[str, Any] = field(default_factory=dict)
    config: str | None = None
    model: str | None = None
    backend: str = "sdpa"
    # Whether keys can be moved to cache-local positions.
    moves_keys: bool = True

    @property
    def classes(self) -> tuple[Any, Any]:
        """The config class and the model class; (None, None) where this transformers lacks them."""
        return (
            getattr(transformers, self.config or f"{self.prefix}Config", None),
            getattr(transformers, self.model or f"{self.prefix}ForCausalLM", None),
        )


_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_LINEAR_AND_FULL = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
# The recurrence divides by lengths of queries and keys: with some weights it makes of the last bit of a softmax more
# than the tests allow.
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
    "initializer_range": 0.22,
}
_MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_d_conv": 4,
    "mamba_chunk_size": 8,
}

FAMILIES: dict[str, Family] = {
    "llama-llama3": Family("Llama", {"rope_parameters": _LLAMA3}),
    "qwen2-mixed": Family(
        "Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW_TOKENS, "max_window_layers": 2}
    ),
    "qwen2-yarn": Family("Qwen2", {"rope_parameters": _YARN}),
    "qwen2_moe": Family("Qwen2Moe", {**_EXPERTS, "shared_expert_intermediate_size": 24}),
    "qwen3": Family("Qwen3", {"head_dim": 12}),
    "qwen3_moe": Family("Qwen3Moe", {"head_dim": 12, **_EXPERTS}),
    "mixtral-window": Family("Mixtral", {"sliding_window": WINDOW_TOKENS, "num_local_experts": 2}),
    "olmo2": Family("Olmo2"),
    "smollm3": Family("SmolLM3", {"no_rope_layers": [1, 0, 1, 0]}),
    "phi3-partial": Family("Phi3", {"rope_parameters": _PARTIAL}),
    "gpt_neox": Family("GPTNeoX", {"num_key_value_heads": None, "rope_parameters": _PARTIAL}),
    "glm": Family("Glm", {"head_dim": 12, "rope_parameters": _PARTIAL}),
    "glm4": Family("Glm4", {"head_dim": 12, "rope_parameters": _PARTIAL}),
    "gemma2": Family(
        "Gemma2",
        {
            "head_dim": 12,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": _SLIDING_AND_FULL,
            "attn_logit_softcapping": 2.0,
            "query_pre_attn_scalar": 6,
        },
        backend="eager",
    ),
    "gemma3": Family(
        "Gemma3",
        {
            "head_dim": 12,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": _SLIDING_AND_FULL,
            "query_pre_attn_scalar": 6,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50000.0},
            },
        },
        config="Gemma3TextConfig",
    ),
    "gpt_oss": Family(
        "GptOss",
        {
            "head_dim": 12,
            "sliding_window": WINDOW_TOKENS,
            "layer_types": _SLIDING_AND_FULL,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "rope_parameters": {**_YARN, "truncate": False},
        },
        backend="eager",
    ),
    # Full layers do not rotate, and scale queries by their position, every fourth one a little more.
    "llama4": Family(
        "Llama4",
        {
            "head_dim": 12,
            "attention_chunk_size": WINDOW_TOKENS,
            "no_rope_layers": [1, 0, 1, 0],
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        config="Llama4TextConfig",
    ),
    "llama4-rotated": Family(
        "Llama4",
        {
            "head_dim": 12,
            "attention_chunk_size": 512,
            "layer_types": ["full_attention"] * 4,
            "no_rope_layers": [1, 0, 1, 1],
            "attn_temperature_tuning": True,
            "floor_scale": 4,
            "attn_scale": 0.5,
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
        config="Llama4TextConfig",
    ),
    "opt": Family(
        "OPT",
        {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.2, "num_key_value_heads": None},
        moves_keys=False,
    ),
    "gpt2": Family(
        "GPT2",
        {"scale_attn_by_inverse_layer_idx": True, "num_key_value_heads": None, "intermediate_size": None},
        model="GPT2LMHeadModel",
        moves_keys=False,
    ),
}
# Linear attention, or convolutions, beside full attention: first, last, in every layer, and beside layers of neither.
HYBRIDS: dict[str, Family] = {
    "qwen3_next": Family(
        "Qwen3Next",
        {
            "head_dim": 12,
            "layer_types": ["linear_attention", "full_attention", "full_attention", "linear_attention"],
            "shared_expert_intermediate_size": 24,
            **_EXPERTS,
            **_DELTA,
        },
    ),
    "qwen3_5": Family(
        "Qwen3_5", {"head_dim": 16, "layer_types": _LINEAR_AND_FULL, **_DELTA}, config="Qwen3_5TextConfig"
    ),
    "lfm2": Family("Lfm2", {"layer_types": ["conv", "full_attention", "conv", "full_attention"], "conv_L_cache": 3}),
    "qwen3_5_moe": Family(
        "Qwen3_5Moe",
        {
            "head_dim": 16,
            "layer_types": _LINEAR_AND_FULL,
            "shared_expert_intermediate_size": 24,
            **_EXPERTS,
            **_DELTA,
        },
        config="Qwen3_5MoeTextConfig",
    ),
    "lfm2_moe": Family(
        "Lfm2Moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "conv_L_cache": 3,
            "num_dense_layers": 1,
            **_EXPERTS,
        },
    ),
    "bamba": Family("Bamba", {"attn_layer_indices": [1, 2], **_MAMBA2}),
    "granitemoehybrid": Family(
        "GraniteMoeHybrid",
        {
            "layer_types": _LINEAR_AND_FULL,
            "num_local_experts": 2,
            "num_experts_per_tok": 1,
            "shared_intermediate_size": 24,
            "position_embedding_type": "nope",
            **_MAMBA2,
        },
    ),
    "jamba": Family(
        "Jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_dt_rank": 4,
            "num_experts": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "falcon_h1": Family("FalconH1", {"mamba_d_ssm": 64, **_MAMBA2}),
    "nemotron_h": Family(
        "NemotronH",
        {
            "layer_types": ["linear_attention", "full_attention", "moe", "full_attention"],
            "head_dim": 8,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "ssm_state_size": 8,
            "n_groups": 1,
            "conv_kernel": 4,
            "chunk_size": 8,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "olmo_hybrid": Family(
        "OlmoHybrid",
        {"layer_types": _LINEAR_AND_FULL, **_DELTA, "linear_num_value_heads": 2, "initializer_range": 0.2},
    ),
}
FAMILIES |= HYBRIDS
MIXED = ("qwen2-mixed", "gemma2", "gemma3", "gpt_oss", "llama4", *HYBRIDS)
# Where a policy that drops tokens between layers is refused.
NOT_PRUNED = (*MIXED, "gpt2")


def require(name: str) -> Family:
    """Return a family; skips where this transformers does not have it."""
    family = FAMILIES[name]
    if None in family.classes:
        pytest.skip(f"transformers {transformers.__version__} has no {family.prefix} models")
    return family


def config_of(name: str, **changed: Any) -> Any:
    """Return a fresh tiny config of a family."""
    family = require(name)
    options: dict[str, Any] = {
        **TINY_DECODER,
        **copy.deepcopy(family.options),
        **changed,
    }
    return family.classes[0](**{name: value for name, value in options.items() if value is not None})


@lru_cache(maxsize=64)
def _master(name: str, backend: str, layers: int, layer_types: tuple[str, ...] | None) -> Any:
    family = require(name)
    changed: dict[str, Any] = {"num_hidden_layers": layers}
    if layer_types is not None:
        changed["layer_types"] = list(layer_types)
    state = torch.random.get_rng_state()
    torch.manual_seed(3)
    try:
        model = family.classes[1](config_of(name, **changed))
    finally:
        torch.random.set_rng_state(state)
    for module in model.modules():
        if hasattr(module, "sinks"):
            torch.nn.init.normal_(module.sinks, std=1.0)
    model.generation_config.eos_token_id = None
    model.set_attn_implementation(backend)
    return model.eval()


def tiny(name: str, backend: str | None = None, *, layers: int = 4, layer_types: tuple[str, ...] | None = None) -> Any:
    """Return a fresh, unattached tiny random model of a family."""
    with torch.inference_mode(False), torch.enable_grad():
        return copy.deepcopy(_master(name, backend or FAMILIES[name].backend, layers, layer_types))


def foreign_content(layer: Any) -> dict[str, torch.Tensor]:
    """Return what a cache layer holds beside rows a policy acts on: states of linear attention, else its rows."""
    if hasattr(layer, "recurrent_states"):
        kinds = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
        parts = {f"{kind}.{i}": part for kind, table in kinds.items() for i, part in table.items()}
        return {name: part for name, part in parts.items() if part is not None}
    if getattr(layer, "keys", None) is None:
        return {}
    return {"keys": layer.keys, "values": layer.values, "columns": torch.tensor(layer.get_seq_length())}
