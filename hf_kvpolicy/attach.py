"""Making a model ready for policy caches, and undoing it exactly.

What `attach` leaves on a model is one registered implementation name in its config and one forward pre-hook that holds
no state; both can be read back from the model itself, so nothing is remembered elsewhere and copies of a model work.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .backends import BACKENDS, admit_backend, backend_of, registered_name, stock_attention
from .cache import PolicyCache
from .compat import cache_of_call, set_implementation
from .errors import ConfigError, UnsupportedModelError
from .frame import enter_forward
from .geometry import NAME_BRANCHING_MODEL_TYPES, text_config
from .registry import model_patch

__all__ = ["attach", "attached_backend", "detach", "model_and_config", "unwrap"]

_Model = TypeVar("_Model", bound=torch.nn.Module)


def attach(model: _Model, backend: str | None = None) -> _Model:
    """Make a model ready for policy caches and return it. Idempotent.

    Args:
        model: a supported `transformers` model, PEFT-wrapped or not.
        backend: attention implementation to wrap ("sdpa", "eager", "flash_attention_2", "flex_attention"); the model's
            current one by default.

    Raises:
        UnsupportedModelError: the family is not supported, or the model did not take the implementation.
        BackendAdmissionError: the backend cannot be wrapped.
    """
    inner = unwrap(model)
    config = text_config(inner.config)
    patch = model_patch(inner.config if getattr(inner.config, "is_encoder_decoder", False) else config)
    if config.model_type in NAME_BRANCHING_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{config.model_type!r} models compare the attention implementation with fixed names and would take "
            "another path under ours; this family is not handled yet."
        )
    before = str(inner.config._attn_implementation)
    name = registered_name(backend or backend_of(before) or before)
    admit_backend(BACKENDS[name])
    if before != name and not set_implementation(inner, name):
        raise UnsupportedModelError(
            f"{type(inner).__name__} keeps its own attention implementation ({inner.config._attn_implementation!r}); "
            "it does not run through transformers' attention interface."
        )
    decoder = patch.decoder(inner)
    stock_attention(BACKENDS[name], _first_attention(decoder))
    if not _hooks(decoder):
        decoder.register_forward_pre_hook(_before_forward, with_kwargs=True)
    return model


def detach(model: _Model) -> _Model:
    """Restore the model's own attention implementation and remove the hook; returns the model. Idempotent."""
    inner = unwrap(model)
    backend = backend_of(str(inner.config._attn_implementation))
    if backend is None:
        return model
    decoder = model_patch(text_config(inner.config)).decoder(inner)
    for key in _hooks(decoder):
        del decoder._forward_pre_hooks[key]
        decoder._forward_pre_hooks_with_kwargs.pop(key, None)
    set_implementation(inner, backend)
    return model


def attached_backend(model: torch.nn.Module) -> str | None:
    """Return the wrapped backend's name, or None for a model that is not attached."""
    return backend_of(str(unwrap(model).config._attn_implementation))


def unwrap(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a wrapper (PEFT).

    Raises:
        UnsupportedModelError: there is none.
    """
    getter = getattr(model, "get_base_model", None)
    inner = getter() if getter is not None else model
    if not isinstance(inner, PreTrainedModel):
        raise UnsupportedModelError(
            f"{type(model).__name__} is not a transformers model. Give the model that from_pretrained returned, or a "
            "PEFT wrapper of it."
        )
    return inner


def model_and_config(given: Any) -> tuple[Any, Any]:
    """Return (model or None, config of its text decoder) of what a cache is made from.

    Raises:
        ConfigError: it is neither a transformers model nor a config.
    """
    if isinstance(given, PreTrainedConfig):
        model, config = None, given
    elif isinstance(given, torch.nn.Module):
        model, config = given, unwrap(given).config
    else:
        raise ConfigError(f"A policy cache is made from a transformers model or config; got {type(given).__name__}.")
    return model, config if getattr(config, "is_encoder_decoder", False) else text_config(config)


def _first_attention(decoder: torch.nn.Module) -> torch.nn.Module:
    for module in decoder.modules():
        if getattr(module, "layer_idx", None) == 0 and hasattr(module, "num_key_value_groups"):
            return module
    raise UnsupportedModelError(f"{type(decoder).__name__} has no attention layer with a layer index.")


def _hooks(decoder: torch.nn.Module) -> list[int]:
    return [key for key, hook in decoder._forward_pre_hooks.items() if hook is _before_forward]


@lru_cache(maxsize=32)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def _before_forward(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tie this forward to its cache, or to none."""
    arguments = kwargs
    if args:
        names = _parameters(type(module).forward)[1:]
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
    cache = cache_of_call(arguments)
    if not isinstance(cache, PolicyCache):
        enter_forward(None)
        return None
    enter_forward(cache)
    cache.begin_forward(cast(PreTrainedModel, module), arguments)
    return None
