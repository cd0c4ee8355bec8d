"""Making a model ready for policy caches, and undoing it exactly.

What `attach` leaves on a model is one registered implementation name in its config, or forwards bound on its attention
modules where those are no functions of transformers (`own_attention`) or on the decoder of a layer-condensed checkpoint
(`repeating`), hooks without state on the model and on its text decoder, and the methods that its family's patch names;
all can be read back from the model itself, so nothing is remembered elsewhere and copies of a model work.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MethodType
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .backends import BACKENDS, admit_backend, backend_of, registered_name, stock_attention
from .cache import PolicyCache
from .compat import cache_of_call, model_supports, set_implementation
from .contract import CONDENSED, declared_training
from .errors import BackendAdmissionError, ConfigError, UnsupportedModelError
from .fingerprint import config_digest
from .frame import READER, Reader, active_cache, enter_forward, take_reader
from .geometry import CacheGeometry, text_config
from .graphs import outside_graphs
from .layers import NOT_ATTACHED
from .own_attention import bind, bound_backend, unbind
from .probe import PROBE_TOKENS, bringing, probe_finding, refuse_unchecked
from .pruning import stop_pruning
from .registry import (
    PROBED,
    UNPROVEN,
    ModelPatch,
    methods_of,
    model_patch,
    remember_probed,
    skips_check,
    supported_model_types,
)
from .unsupported import unsupported_because

__all__ = ["attach", "attached_backend", "attention_carrier", "detach", "family_of", "model_and_config", "unwrap"]

_Model = TypeVar("_Model", bound=torch.nn.Module)
# Classes and configs of models without a patch that were checked, or are served unproven, and what serves them.
_CHECKED: dict[tuple[str, str, str], ModelPatch] = {}


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
    patch = family_of(inner)
    decoder = patch.decoder(inner)
    named = attention_carrier(inner)
    before = str(named.config._attn_implementation)
    own = patch.own_attention(decoder) if patch.attends_itself else None
    bound = None if own is None else bound_backend(own.modules)
    name = registered_name(backend or bound or backend_of(before) or before)
    admit_backend(BACKENDS[name])
    training = declared_training(text_config(inner.config))
    repeats = training is not None and training[0] == CONDENSED
    if repeats:
        from .repeating import refuse_unrepeatable  # no other checkpoint needs it

        refuse_unrepeatable(patch, decoder)
    methods = {name: function for name, function in patch.methods(inner.config).items() if hasattr(inner, name)}
    _refuse_replaced(inner, methods)
    has_states = bool(CacheGeometry.from_config(decoder.config).state_layers)
    # All that can be refused is by now, but for what takes the backend as a whole or not at all.
    if own is not None:
        bind(own, BACKENDS[name])
    else:
        _take_backend(named, name, patch.attention(decoder))
    if repeats:
        from .repeating import repeat_layers

        repeat_layers(decoder, BACKENDS[name])
    _hook(decoder, _before_forward, _after_forward if has_states else None)
    if inner is not decoder:
        _hook(inner, _before_call, _after_call)
    for method, function in methods.items():
        setattr(inner, method, MethodType(function, inner))
    return model


def _take_backend(named: PreTrainedModel, name: str, attention: torch.nn.Module) -> None:
    """Name an implementation of ours in the config of a model that calls the interface, or change nothing."""
    before, backend = str(named.config._attn_implementation), BACKENDS[name]
    if before not in (name, backend) and not model_supports(named, backend):
        raise BackendAdmissionError(
            f"{type(named).__name__} does not run under {backend!r} in transformers, which lacks something that "
            'its attention does (a cap on logits, attention sinks, ...). Call attach(model, backend="eager").'
        )
    stock_attention(backend, attention)
    if before != name and not set_implementation(named, name):
        raise UnsupportedModelError(
            f"{type(named).__name__} keeps its own attention implementation ({before!r}); it does not run through "
            "transformers' attention interface."
        )


def _refuse_replaced(model: PreTrainedModel, methods: Mapping[str, Callable[..., Any]]) -> None:
    """Refuse a model on which somebody else set one of the methods that its family's patch sets."""
    for name, function in methods.items():
        found = vars(model).get(name)
        # Unpickling binds the class's own on the instance in the place of ours.
        if found is not None and getattr(found, "__func__", None) not in (function, getattr(type(model), name)):
            raise UnsupportedModelError(
                f"The method {name!r} of this {type(model).__name__} was replaced on the instance, where attaching "
                "would put one of its own, so that yours would be lost. Undo that first (del "
                f"model.{name}), or override it in a subclass."
            )


def family_of(model: PreTrainedModel) -> ModelPatch:
    """Return the patch of a model's family; a family without one is checked on the model, once per class and config.

    Raises:
        UnsupportedModelError: the model is of a kind no policy serves, or the check found something.
    """
    config: Any = model.config
    kind = str(config.model_type)
    if kind in supported_model_types() or unsupported_because(config) is not None:
        return model_patch(config)
    asked = (type(model).__module__, type(model).__qualname__, config_digest(config))
    found = _CHECKED.get(asked)
    # What is served by the user's word is checked once that is taken back.
    if found is None or (found.proof != PROBED and not skips_check()):
        found = _CHECKED[asked] = remember_probed(config, _proof(model, kind))
    return found


def _proof(model: PreTrainedModel, kind: str) -> str:
    if skips_check():
        warnings.warn(
            f"The model family {kind!r} has no patch and was not checked (KVPOLICY_PROBE=0); manifests of its caches "
            "say that it is unproven.",
            stacklevel=4,
        )
        return UNPROVEN
    if CacheGeometry.from_config(model.config).state_layers:
        raise UnsupportedModelError(
            f"The model family {kind!r} is not supported: it has no patch, and what its linear-attention layers do "
            "with their states cannot be checked from outside. Supported families: "
            f"{', '.join(supported_model_types())}."
        )
    finding = probe_finding(model, CacheGeometry.from_config(model.config))
    if finding is not None:
        raise UnsupportedModelError(
            f"The model family {kind!r} is not supported: it has no patch, and a check of {PROBE_TOKENS} tokens on "
            f"this model says that it {finding}. Supported families: {', '.join(supported_model_types())}. "
            "KVPOLICY_PROBE=0 skips the check, at your own risk."
        )
    return PROBED


def detach(model: _Model) -> _Model:
    """Remove all that `attach` left, and name transformers' own implementation that was wrapped; returns the model.

    Idempotent. What is ours says so itself, so neither another implementation chosen since nor a config that was
    changed keeps any of it on the model.
    """
    inner = unwrap(model)
    for module in inner.modules():
        _unhook(module)
    for method, function in methods_of(inner.config).items():
        if getattr(vars(inner).get(method), "__func__", None) is function:
            delattr(inner, method)
    stop_pruning(inner.modules())
    unbind(inner.modules())
    backend = backend_of(str(text_config(inner.config)._attn_implementation))
    if backend is not None:
        set_implementation(attention_carrier(inner), backend)
    return model


def attached_backend(model: torch.nn.Module) -> str | None:
    """Return the wrapped backend's name, or None for a model that is not attached."""
    inner = unwrap(model)
    name = str(text_config(inner.config)._attn_implementation)
    return backend_of(name) or bound_backend(inner.modules())


def attention_carrier(model: PreTrainedModel) -> PreTrainedModel:
    """Return the module whose attention is named: the model, or of one that feeds images to a decoder, the decoder."""
    if text_config(model.config) is model.config:
        return model
    return cast(PreTrainedModel, model.get_decoder())


def unwrap(model: torch.nn.Module) -> PreTrainedModel:
    """Return the transformers model inside a wrapper (PEFT, or what torch.compile returns).

    Raises:
        UnsupportedModelError: there is none.
    """
    given = getattr(model, "_orig_mod", model)
    getter = getattr(given, "get_base_model", None)
    inner = getter() if getter is not None else given
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


def _hook(module: torch.nn.Module, before: Callable[..., Any], after: Callable[..., Any] | None) -> None:
    """Register hooks around a module's forward, where they are not yet."""
    if before not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(before, with_kwargs=True)
    if after is not None and after not in module._forward_hooks.values():
        # A call that dies must be forgotten too; a forward that dies ends at the next one, or a rollback.
        module.register_forward_hook(after, always_call=after is _after_call)


def _unhook(module: torch.nn.Module) -> None:
    """Remove our hooks."""
    for key in [key for key, hook in module._forward_pre_hooks.items() if hook in (_before_call, _before_forward)]:
        del module._forward_pre_hooks[key]
        module._forward_pre_hooks_with_kwargs.pop(key, None)
    for key in [key for key, hook in module._forward_hooks.items() if hook in (_after_call, _after_forward)]:
        del module._forward_hooks[key]
        module._forward_hooks_always_called.pop(key, None)


@lru_cache(maxsize=32)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)


def _arguments(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by name."""
    if not args:
        return kwargs
    return {**dict(zip(_parameters(type(module).forward)[1:], args, strict=False)), **kwargs}


@outside_graphs
def _before_call(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note what the outer model brings and will read of its decoder's output, if its call carries a policy cache."""
    arguments = _arguments(module, args, kwargs)
    cache = cache_of_call(arguments)
    if not isinstance(cache, PolicyCache):
        READER.set(None)
        return
    chooses = "logits_to_keep" in _parameters(type(module).forward)
    READER.set(
        Reader(
            cache=weakref.ref(cache),
            has_labels=arguments.get("labels") is not None,
            logits_to_keep=arguments.get("logits_to_keep", 0) if chooses else None,
            input_ids=arguments.get("input_ids"),
            brings=bringing(arguments),
        )
    )


@outside_graphs
def _after_call(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Forget a call that ended, or died, before its decoder ran."""
    READER.set(None)


@outside_graphs
def _before_forward(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Tie this forward to its cache, or to none."""
    arguments = _arguments(module, args, kwargs)
    given = cache_of_call(arguments)
    cache = given if isinstance(given, PolicyCache) else None
    reader = take_reader(cache)
    if cache is None:
        enter_forward(None)
        return None
    if attached_backend(module) is None:  # another implementation was chosen since
        raise ConfigError(NOT_ATTACHED)
    if cache.family.proof == PROBED:
        refuse_unchecked(bringing(arguments) | (reader.brings if reader is not None else frozenset()))
    enter_forward(cache)
    cache.begin_forward(cast(PreTrainedModel, module), arguments, reader)
    return None


@outside_graphs
def _after_forward(module: torch.nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """End the forward of a model with linear attention, whose last attention is not the last change of a state."""
    cache = active_cache()
    if cache is not None:
        cache.end_forward()
