"""Making a model ready for policy caches, and undoing it exactly.

What `attach` leaves on a model is one registered implementation name in its config and two forward pre-hooks that hold
no state, on the model and on its text decoder; all can be read back from the model itself, so nothing is remembered
elsewhere and copies of a model work.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .backends import BACKENDS, admit_backend, backend_of, registered_name, stock_attention
from .cache import PolicyCache
from .compat import cache_of_call, model_supports, set_implementation
from .errors import BackendAdmissionError, ConfigError, UnsupportedModelError
from .frame import READER, Reader, enter_forward, take_reader
from .geometry import NAME_BRANCHING_MODEL_TYPES, text_config
from .pruning import stop_pruning
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
    patch = model_patch(inner.config)
    if config.model_type in NAME_BRANCHING_MODEL_TYPES:
        raise UnsupportedModelError(
            f"{config.model_type!r} models compare the attention implementation with fixed names and would take "
            "another path under ours; this family is not handled yet."
        )
    before = str(inner.config._attn_implementation)
    name = registered_name(backend or backend_of(before) or before)
    admit_backend(BACKENDS[name])
    if before not in (name, BACKENDS[name]) and not model_supports(inner, BACKENDS[name]):
        raise BackendAdmissionError(
            f"{type(inner).__name__} does not run under {BACKENDS[name]!r} in transformers, which lacks something that "
            'its attention does (a cap on logits, attention sinks, ...). Call attach(model, backend="eager").'
        )
    if before != name and not set_implementation(inner, name):
        raise UnsupportedModelError(
            f"{type(inner).__name__} keeps its own attention implementation ({inner.config._attn_implementation!r}); "
            "it does not run through transformers' attention interface."
        )
    decoder = patch.decoder(inner)
    stock_attention(BACKENDS[name], patch.attention(decoder))
    for module, hook in _places(inner, decoder):
        if not _hooks(module, hook):
            module.register_forward_pre_hook(hook, with_kwargs=True)
    for method, function in patch.methods(config).items():
        if hasattr(inner, method):
            setattr(inner, method, MethodType(function, inner))
    return model


def detach(model: _Model) -> _Model:
    """Restore the model's own attention implementation and remove every hook; returns the model. Idempotent."""
    inner = unwrap(model)
    backend = backend_of(str(inner.config._attn_implementation))
    if backend is None:
        return model
    patch = model_patch(inner.config)
    decoder = patch.decoder(inner)
    for module, hook in _places(inner, decoder):
        for key in _hooks(module, hook):
            del module._forward_pre_hooks[key]
            module._forward_pre_hooks_with_kwargs.pop(key, None)
    for method in patch.methods(inner.config):
        inner.__dict__.pop(method, None)
    stop_pruning(decoder.modules())
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
    """Return (model or None, its config) of what a cache is made from.

    Raises:
        ConfigError: it is neither a transformers model nor a config.
    """
    if isinstance(given, PreTrainedConfig):
        model, config = None, given
    elif isinstance(given, torch.nn.Module):
        model, config = given, unwrap(given).config
    else:
        raise ConfigError(f"A policy cache is made from a transformers model or config; got {type(given).__name__}.")
    return model, config


def _places(model: torch.nn.Module, decoder: torch.nn.Module) -> list[tuple[torch.nn.Module, Callable[..., Any]]]:
    outer = [] if model is decoder else [(model, _before_call)]
    return [*outer, (decoder, _before_forward)]


def _hooks(module: torch.nn.Module, wanted: Callable[..., Any]) -> list[int]:
    return [key for key, hook in module._forward_pre_hooks.items() if hook is wanted]


@lru_cache(maxsize=32)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def _arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    if not args:
        return kwargs
    return {**dict(zip(_parameters(type(module).forward)[1:], args, strict=False)), **kwargs}


def _before_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what the outer model will read of its decoder's output."""
    arguments = _arguments(module, args, kwargs)
    chooses = "logits_to_keep" in _parameters(type(module).forward)
    READER.set(
        Reader(
            has_labels=arguments.get("labels") is not None,
            logits_to_keep=arguments.get("logits_to_keep", 0) if chooses else None,
        )
    )


def _before_forward(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tie this forward to its cache, or to none."""
    reader = take_reader()
    arguments = _arguments(module, args, kwargs)
    cache = cache_of_call(arguments)
    if not isinstance(cache, PolicyCache):
        enter_forward(None)
        return None
    enter_forward(cache)
    cache.begin_forward(cast(PreTrainedModel, module), arguments, reader)
    return None
