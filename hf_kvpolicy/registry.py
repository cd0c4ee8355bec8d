"""Names of policies and model families: built-in ones, decorators, and entry points of other packages.

Entry point groups: `hf_kvpolicy.policies` and `hf_kvpolicy.model_patches`. Each entry loads a module or class whose
import registers it.
"""

from __future__ import annotations

import importlib
import inspect
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from .contract import RESERVED_POLICIES, checkpoint_needed
from .errors import CheckpointAdmissionError, ConfigError, UnsupportedModelError, did_you_mean
from .fingerprint import config_digest
from .geometry import text_config
from .unsupported import unsupported_because

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from .own_attention import OwnAttention
    from .positions import AlibiSpec, RotarySpec

__all__ = [
    "PROBED",
    "UNPROVEN",
    "ModelPatch",
    "available_policies",
    "check_options",
    "example_training",
    "methods_of",
    "model_patch",
    "needs_training",
    "policy_class",
    "register_fallback_patch",
    "register_model_patch",
    "register_policy",
    "remember_probed",
    "skips_check",
    "supported_model_types",
]


# Of a family without a patch: that a loaded model was checked, or that the user had the check skipped.
PROBED, UNPROVEN = "probed", "unproven"


class ModelPatch(Protocol):
    """What a family must tell the engine. One stateless object per family, in `model_patches/`."""

    @property
    def model_types(self) -> tuple[str, ...]:
        """The `config.model_type` values this patch serves."""
        ...

    @property
    def proof(self) -> str:
        """How it is known that the family is served rightly: 'patched', 'probed' or 'unproven'."""
        ...

    @property
    def key_stage(self) -> str:
        """Position stage of cached keys that carry one: 'post_rope' or 'pre_rope'. With ALiBi it is 'no_rope'."""
        ...

    def decoder(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the text decoder whose forward receives the cache."""
        ...

    def decoder_layers(self, decoder: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Return the decoder's layers in order; raise UnsupportedModelError where they cannot be told."""
        ...

    def attention(self, decoder: torch.nn.Module) -> torch.nn.Module:
        """Return the first layer's attention module; the family's eager function lies beside its class."""
        ...

    def methods(self, config: Any) -> Mapping[str, Callable[..., Any]]:
        """Return methods that `attach` sets on the model itself and `detach` removes: the same functions every time."""
        ...

    def check(self, config: Any) -> None:
        """Raise UnsupportedModelError if this config is outside what the patch handles."""
        ...

    @property
    def repeats_layers(self) -> bool:
        """Whether the decoder's forward may be run several times, each time over the same or some of the tokens."""
        ...

    def rotary(self, decoder: torch.nn.Module, layers: Sequence[int]) -> RotarySpec:
        """Return how keys of these layers are rotated; raise UnsupportedModelError where they cannot be moved."""
        ...

    def alibi(self, config: Any) -> AlibiSpec | None:
        """Return how logits are biased by distance; None for a config whose keys carry positions."""
        ...

    @property
    def attends_itself(self) -> bool:
        """Whether attention modules do not use the attention interface, so that `own_attention` serves them."""
        ...

    def own_attention(self, decoder: torch.nn.Module) -> OwnAttention:
        """Return what replaces the forward of attention modules; asked for only where they attend themselves."""
        ...


_Policy = TypeVar("_Policy", bound=type)
_Patch = TypeVar("_Patch", bound=type)
_POLICIES: dict[str, type] = {}
_PATCHES: dict[str, ModelPatch] = {}
# Of families without a patch: the digest of a config whose model was checked -> what serves it.
_PROBED: dict[str, ModelPatch] = {}
_FALLBACK: list[Callable[[str], ModelPatch]] = []
_LOADED: set[str] = set()


def register_policy(name: str) -> Callable[[_Policy], _Policy]:
    """Class decorator: make a `PolicyCache` subclass available by name.

    Raises:
        ConfigError: the name is not lower-case snake case, is reserved, or is taken by another class.
    """
    if name in RESERVED_POLICIES:
        raise ConfigError(f"The policy name {name!r} is reserved for a method of its own checkpoints; use another.")
    if not name.isidentifier() or name != name.lower():
        raise ConfigError(f"The policy name {name!r} is not lower-case snake case; use a name such as 'my_policy'.")

    def register(cls: _Policy) -> _Policy:
        known = _POLICIES.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ConfigError(f"The policy name {name!r} is already taken by {known.__module__}.{known.__qualname__}.")
        _POLICIES[name] = cls
        return cls

    return register


def register_model_patch(cls: _Patch) -> _Patch:
    """Class decorator: make a `ModelPatch` available for its model types. A later registration wins."""
    patch: ModelPatch = cls()
    for model_type in patch.model_types:
        _PATCHES[model_type] = patch
    return cls


def register_fallback_patch(cls: _Patch) -> _Patch:
    """Class decorator: let a patch, made from how it is proven, serve models of families without one."""
    _FALLBACK.append(cls)
    return cls


def available_policies() -> tuple[str, ...]:
    """Return the names of all registered policies, sorted."""
    _load("hf_kvpolicy.policies")
    return tuple(sorted(_POLICIES))


def policy_class(name: str) -> type:
    """Return the cache class of a policy.

    Raises:
        ConfigError: no policy has that name, or it is no word.
        CheckpointAdmissionError: the name is reserved for a method that no ordinary checkpoint can run.
    """
    if not isinstance(name, str):
        raise ConfigError(f"A policy is named by a word, one of {', '.join(available_policies())}; got {name!r}.")
    if name in RESERVED_POLICIES:
        raise CheckpointAdmissionError(
            f"{name!r} is no cache policy: what it stores ({RESERVED_POLICIES[name]}) is read only by "
            f"{checkpoint_needed(name)}, which this library does not load. describe_state({RESERVED_POLICIES[name]!r}, "
            f"...) tells its bytes. For an ordinary checkpoint choose one of {', '.join(available_policies())}."
        )
    names = available_policies()
    if name not in _POLICIES:
        raise ConfigError(f"There is no policy {name!r}; available are {', '.join(names)}.{did_you_mean(name, names)}")
    return _POLICIES[name]


def needs_training(name: str) -> bool:
    """Whether a policy runs only with checkpoints that were trained for it."""
    return hasattr(policy_class(name), "example_training")


def example_training(name: str, num_layers: int) -> dict[str, Any] | None:
    """Return what a config says under `kvpolicy` of a checkpoint for this policy; None where any checkpoint will do."""
    return policy_class(name).example_training(num_layers) if needs_training(name) else None  # type: ignore[attr-defined]


def check_options(cls: type, options: Mapping[str, Any]) -> None:
    """Refuse options that a policy's constructor does not have, lacks, or declares of another type.

    Raises:
        ConfigError: of the first such option. Types that are not plain (budgets, profiles) are left to the policy.
    """
    _check_names(cls, options)
    declared = _declared_types(cls)
    for name, value in options.items():
        types = declared.get(name, ())
        if types and not any(_TYPES[word][1](value) for word in types):
            wanted = " or ".join(_TYPES[word][0] for word in types)
            raise ConfigError(f"{cls.__name__}: {name}={value!r} must be {wanted}, but is a {type(value).__name__}.")


def _check_names(cls: type, options: Mapping[str, Any]) -> None:
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    named = [name for name, parameter in parameters.items() if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    for name in options:
        if name not in parameters:
            raise ConfigError(
                f"{cls.__name__} has no option {name!r}; it has {', '.join(named) or 'none'}."
                f"{did_you_mean(name, named)}"
            )
    missing = [name for name in named if parameters[name].default is inspect.Parameter.empty and name not in options]
    if missing:
        raise ConfigError(f"{cls.__name__} needs {', '.join(missing)} by keyword; give for example budget=1024.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


# Annotations that are checked: in words, and what they admit.
_TYPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("a whole number", _is_whole),
    "float": ("a finite number", _is_number),
    "bool": ("True or False", lambda value: isinstance(value, bool)),
    "str": ("a word", lambda value: isinstance(value, str)),
    "Iterable[int]": ("a list of whole numbers", lambda value: isinstance(value, Iterable) and not _is_text(value)),
    "None": ("None", lambda value: value is None),
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str | bytes)


@lru_cache(maxsize=64)
def _declared_types(cls: type) -> dict[str, tuple[str, ...]]:
    """Return the words of each option's annotation where all of them can be checked."""
    found = {}
    for name, parameter in inspect.signature(cls).parameters.items():
        words = tuple(word.strip() for word in inspect.formatannotation(parameter.annotation).strip("'").split("|"))
        if all(word in _TYPES for word in words):
            found[name] = words
    return found


def supported_model_types() -> tuple[str, ...]:
    """Return the `model_type` of every family with a patch, sorted."""
    _load("hf_kvpolicy.model_patches")
    return tuple(sorted(_PATCHES))


def skips_check() -> bool:
    """Whether the user asks for models of families without a patch to be served unchecked, as long as it says so."""
    return os.environ.get("KVPOLICY_PROBE") == "0"


def remember_probed(config: Any, proof: str) -> ModelPatch:
    """Let models of this config be served by what was checked on one of them, or by the user's word; return it."""
    _load("hf_kvpolicy.model_patches")
    patch = _PROBED[config_digest(config)] = _FALLBACK[-1](proof)
    return patch


def _remembered(config: Any) -> ModelPatch | None:
    found = _PROBED.get(config_digest(config))
    return None if found is None or (found.proof == UNPROVEN and not skips_check()) else found


def model_patch(config: Any) -> ModelPatch:
    """Return the patch of a model's family.

    Raises:
        UnsupportedModelError: the model is of a kind that no policy serves, the family has no patch, or this config is
            outside what the patch handles.
    """
    supported = supported_model_types()
    model_type = str(getattr(config, "model_type", type(config).__name__))
    # Of a wrapper with a patch, its text decoder is what may be of a kind no policy serves.
    reason = unsupported_because(text_config(config) if model_type in _PATCHES else config)
    if reason is not None:
        raise UnsupportedModelError(f"{model_type!r} {reason}. Supported families: {', '.join(supported)}.")
    patch = _PATCHES.get(model_type) or _remembered(config)
    if patch is None:
        raise UnsupportedModelError(
            f"The model family {model_type!r} is not supported. Supported families: {', '.join(supported)}. "
            "Others are checked when a model is attached, so give the model instead of its config; or add the family "
            "with @register_model_patch, see CONTRIBUTING.md."
        )
    patch.check(config)
    return patch


def methods_of(config: Any) -> Mapping[str, Callable[..., Any]]:
    """Return the methods that attaching sets on a model, whatever became of its config since."""
    _load("hf_kvpolicy.model_patches")
    patch = _PATCHES.get(str(config.model_type)) or _FALLBACK[-1](UNPROVEN)
    return patch.methods(config)


def _load(group: str) -> None:
    """Import the built-in members of a group, then other packages' entry points, once."""
    if group in _LOADED:
        return
    _LOADED.add(group)
    importlib.import_module(group)
    for entry in entry_points(group=group):
        entry.load()
