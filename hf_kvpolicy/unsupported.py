"""Kinds of models a policy cache cannot serve yet, told from the config, each with its reason."""

from __future__ import annotations

from typing import Any

from .geometry import NAME_BRANCHING_MODEL_TYPES, NO_ATTENTION, STATE_LAYERS, text_config

__all__ = ["unsupported_because"]

# What a config says once for all layers here, where transformers lets it vary by layer.
_OF_ALL_LAYERS = frozenset(
    {
        "attention_chunk_size",
        "head_dim",
        "hidden_size",
        "kv_lora_rank",
        "layer_types",
        "num_attention_heads",
        "num_key_value_heads",
        "num_kv_shared_layers",
        "sliding_window",
        "use_sliding_window",
        "v_head_dim",
    }
)

# What `layer_types` may name: full attention is compressed, everything else is left to transformers.
_KNOWN_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"} | STATE_LAYERS | NO_ATTENTION

# Wrappers that prepare masks in which tokens of one image see one another.
_LOOKS_AHEAD = frozenset({"colpali", "gemma3n", "paligemma", "shieldgemma2", "t5gemma2"})


def unsupported_because(config: Any) -> str | None:
    """Return why no family with this config is supported, as a clause after its name; None where nothing is known."""
    if getattr(config, "is_encoder_decoder", False):
        return "is an encoder-decoder model; policy caches serve decoder-only models"
    if text_config(config) is not config:
        inner = text_config(config).model_type
        if config.model_type in _LOOKS_AHEAD:
            return (
                f"wraps a text decoder ({inner!r}) and prepares its masks itself, so that tokens of an image attend to "
                "one another in both directions; a cache of chosen rows cannot follow prepared masks. Load the text "
                "decoder alone (AutoModelForCausalLM)"
            )
        return (
            f"wraps a text decoder ({inner!r}) with other parts (vision, audio) and has no patch, so nothing shows "
            "what it hands to the decoder. Load the text decoder alone (AutoModelForCausalLM)"
        )
    if getattr(config, "model_type", None) in NAME_BRANCHING_MODEL_TYPES:
        return (
            "is not supported: its code compares the attention implementation with fixed names, and would take another "
            "path under ours"
        )
    varying = sorted(_OF_ALL_LAYERS & set(getattr(config, "per_layer_attributes", None) or ()))
    if varying:
        return (
            f"has layers that differ in {', '.join(varying)} (per_layer_config); a policy cache stores rows of one "
            "shape in every layer"
        )
    if getattr(config, "kv_lora_rank", None):
        return (
            f"caches keys and values in a latent of its own (MLA, kv_lora_rank={config.kv_lora_rank}), which is not "
            "what attention reads"
        )
    if getattr(config, "num_kv_shared_layers", None):
        return (
            f"shares keys and values between layers (num_kv_shared_layers={config.num_kv_shared_layers}): a row that "
            "one layer drops is read by others, which are not observed"
        )
    types = set(getattr(config, "layer_types", None) or ())
    if getattr(config, "attention_chunk_size", None) and "full_attention" not in types:
        return (
            f"attends within chunks of {config.attention_chunk_size} tokens in every layer (attention_chunk_size), "
            "whose rows no later chunk reads: nothing is left for a policy to drop"
        )
    if types and types <= NO_ATTENTION:
        return f"has only layers of kind {', '.join(sorted(types))}, which keep no rows that a policy could choose from"
    kinds = sorted(types - _KNOWN_LAYERS)
    if kinds:
        return f"has layers of kind {', '.join(kinds)}, whose state is no set of rows that could be dropped"
    return None
