"""The only module that knows transformers versions. Supported: 5.17 up to the newest release."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import transformers
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin, LinearAttentionLayer
from transformers.masking_utils import (
    AttentionMaskInterface,
    causal_mask_function,
    sliding_window_causal_mask_function,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface

__all__ = [
    "CACHE_NAMES",
    "NotedCache",
    "attention_function",
    "backend_is_available",
    "cache_argument",
    "cache_of_call",
    "holds_states",
    "is_plain_causal",
    "leaving_no_hooks",
    "mask_function",
    "mask_rule",
    "model_supports",
    "register_attention",
    "set_implementation",
    "stock_layers",
    "transformers_version",
]

# Keyword of the cache in forward and generate: `cache` from 5.23 on, `past_key_values` before.
CACHE_NAMES = ("cache", "past_key_values")
# What transformers sets on a model when it hooks its layers to collect their outputs.
_COLLECTS = "_output_capturing_hooks_installed"


@lru_cache(maxsize=1)
def cache_argument() -> str:
    """Return the keyword under which this transformers release passes a cache to `forward` and `generate`."""
    from transformers import GenerationMixin

    names = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
    return "cache" if "cache" in names else "past_key_values"


def cache_of_call(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among a forward call's arguments, whichever name carries it, or None."""
    for name in CACHE_NAMES:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def backend_is_available(name: str) -> bool:
    """Whether an attention implementation of transformers can run on this machine."""
    from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

    probes = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    return bool(probes[name]()) if name in probes else True


def model_supports(model: PreTrainedModel, backend: str) -> bool:
    """Whether a model's class declares that it runs under an attention implementation of transformers."""
    flags = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
    name = flags.get(backend, "_supports_flash_attn" if backend.startswith("flash") else "")
    return bool(getattr(model, name, True))


def register_attention(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Register an attention function and its mask function under our own name (idempotent)."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def attention_function(name: str) -> Callable[..., Any] | None:
    """Return transformers' own attention function of that name; None for `eager`, which lives in each model's file."""
    found: Callable[..., Any] | None = ALL_ATTENTION_FUNCTIONS.get(name)
    return found


def mask_function(name: str) -> Callable[..., Any]:
    """Return transformers' own mask function of that name."""
    found: Callable[..., Any] = AttentionMaskInterface()[name]
    return found


def set_implementation(model: PreTrainedModel, name: str) -> bool:
    """Ask the model to use an attention implementation; return whether it took it. Where it did not, nothing changed.

    Parts with configs of their own (vision, audio) keep theirs. Some families only log and keep what they have, so the
    config is read back.
    """
    configs = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    before = [(config, config._attn_implementation_internal) for config in configs]
    taken = False
    try:
        model.set_attn_implementation({"": name})
        taken = bool(model.config._attn_implementation == name)
    finally:
        if not taken:
            for config, implementation in before:
                config._attn_implementation_internal = implementation
    return taken


@contextmanager
def leaving_no_hooks(model: torch.nn.Module) -> Iterator[None]:
    """Remove the hooks that transformers puts on layers, for good, where a first call asks for attention weights."""
    before = [(part, set(part._forward_hooks), _COLLECTS in vars(part)) for part in model.modules()]
    try:
        yield
    finally:
        for part, hooks, collects in before:
            for key in set(part._forward_hooks) - hooks:
                del part._forward_hooks[key]
            if not collects:
                vars(part).pop(_COLLECTS, None)


def is_plain_causal(function: Callable[..., Any]) -> bool:
    """Whether a mask function is the unmodified causal one."""
    return function is causal_mask_function


def mask_rule(window_tokens: int | None) -> Callable[..., Any]:
    """Return transformers' own index rule: plain causal, or a sliding window of that many tokens, self included."""
    rule: Callable[..., Any] = (
        causal_mask_function if window_tokens is None else sliding_window_causal_mask_function(window_tokens)
    )
    return rule


class NotedCache(DynamicCache):  # type: ignore[misc]
    """Transformers' own cache, which notes what it returned last."""

    last: tuple[Any, Any] | None = None

    def update(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Update as ever."""
        self.last = super().update(*args, **kwargs)
        return self.last


def stock_layers(config: Any, numbers: Sequence[int]) -> tuple[Any, ...]:
    """Return the empty cache layers that transformers itself would make for what no policy acts on in some layers.

    Of a layer with both attention and states, that is a layer of the states.
    """
    made = [DynamicCache(config=config).layers[number] for number in numbers] if numbers else []
    return tuple(
        LinearAttentionLayer(number_of_states=layer.number_of_states)
        if holds_states(layer) and isinstance(layer, CacheLayerMixin)
        else layer
        for layer in made
    )


def holds_states(layer: Any) -> bool:
    """Whether a cache layer holds states of linear attention."""
    return isinstance(layer, LinearAttentionCacheLayerMixin)


def transformers_version() -> str:
    """Return the running release, for records."""
    return str(transformers.__version__)
