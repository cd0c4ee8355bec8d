"""Families whose attention is no function of transformers: forwards bound on one model's own modules.

Such a module projects, caches and attends in its own `forward`. `bind` puts an attribute of that name on the instance;
the class, and every other instance, stay as they are. With a policy cache the family projects queries, keys and values
and hands them to the engine; with any other cache, or none, the class's own forward runs. `unbind` deletes the
attribute. No state is kept: copies of a model carry their own binding.

Letters: B batch rows, Q query heads, H KV heads, T new tokens, D head dimension.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor

from .attention import attend_layer
from .cache import PolicyCache
from .compat import CACHE_NAMES
from .errors import BackendAdmissionError, UnsupportedModelError
from .graphs import outside_graphs
from .masks import MaskRecord

__all__ = ["Attend", "BoundForward", "OwnAttention", "bind", "bound_backend", "place", "refuse_replaced", "unbind"]

# What attention modules call the cache, beside what models call it.
_CACHE_NAMES = ("layer_past", *CACHE_NAMES)


class Attend(Protocol):
    """Caches a layer's new rows and attends."""

    def __call__(
        self, query_BQTD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, *, scaling: float, dropout: float = 0.0
    ) -> Tensor:
        """Return the heads' outputs side by side, [B, T, Q * D]."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnAttention:
    """What a family says of its attention modules."""

    modules: tuple[torch.nn.Module, ...]
    # Called with a module, the engine's side and the call's arguments by name; returns what the class's forward does.
    forward: Callable[[Any, Attend, Mapping[str, Any]], Any]
    # Backends that carry what the family adds to logits.
    backends: tuple[str, ...] = ("sdpa", "eager")
    why: str = "it does not carry what the family's attention adds to logits, or has no function for its modules"


class BoundForward:
    """A forward of ours that a module runs instead of its class's; `backend` is what its model attends with."""

    def __init__(self, backend: str) -> None:
        self.backend = backend

    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Run."""
        raise NotImplementedError


class _Placed:
    """A forward of ours on one module; unlike a method, it can be pickled with it."""

    def __init__(self, forward: BoundForward, module: torch.nn.Module) -> None:
        self.forward = forward
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run."""
        return self.forward(self.module, *args, **kwargs)


class _AttendingForward(BoundForward):
    """One family's forward over one backend."""

    def __init__(self, forward: Callable[[Any, Attend, Mapping[str, Any]], Any], backend: str) -> None:
        super().__init__(backend)
        self.forward = forward

    @outside_graphs
    def __call__(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Attend through the engine where the call carries a policy cache, else as the class does."""
        own = type(module).forward
        arguments = {**dict(zip(_parameters(own)[1:], args, strict=False)), **kwargs}
        cache = next((arguments[name] for name in _CACHE_NAMES if arguments.get(name) is not None), None)
        if not isinstance(cache, PolicyCache):
            return own(module, *args, **kwargs)
        return self.forward(module, partial(_attend, self.backend, module, cache), arguments)


def bind(own: OwnAttention, backend: str) -> None:
    """Bind a family's forward on its modules, all or none. Idempotent.

    Raises:
        BackendAdmissionError: the backend does not carry what the family adds to logits.
        UnsupportedModelError: somebody else replaced a module's forward.
    """
    if backend not in own.backends:
        raise BackendAdmissionError(
            f"The backend {backend!r} cannot serve policy caches of this model: {own.why}. "
            f'Possible: {", ".join(own.backends)}. Call attach(model, backend="{own.backends[0]}").'
        )
    refuse_replaced(own.modules)
    for module in own.modules:
        place(module, _AttendingForward(own.forward, backend))


def refuse_replaced(modules: Iterable[torch.nn.Module]) -> None:
    """Refuse modules whose forward is somebody else's.

    Raises:
        UnsupportedModelError: of the first such module.
    """
    for module in modules:
        if _bound(module) is None and "forward" in module.__dict__ and _slot(module) == "forward":
            raise UnsupportedModelError(
                f"The forward of this {type(module).__name__} was replaced on the instance, so that a policy cache "
                "cannot take its place without losing it. Undo that first, or load the model anew."
            )


def place(module: torch.nn.Module, forward: BoundForward) -> None:
    """Put a forward of ours on an instance, where none of its backend is yet."""
    bound = _bound(module)
    if bound is None or bound.backend != forward.backend:
        setattr(module, _slot(module), _Placed(forward, module))


def unbind(modules: Iterable[torch.nn.Module]) -> None:
    """Remove what `place` put on any of these modules. Idempotent."""
    for module in modules:
        if _bound(module) is None:
            continue
        if _slot(module) == "forward":
            delattr(module, "forward")
        else:
            setattr(module, "_old_forward", MethodType(type(module).forward, module))  # noqa: B010


def bound_backend(modules: Iterable[torch.nn.Module]) -> str | None:
    """Return the backend of the first bound module, or None where none is."""
    found = (bound.backend for bound in map(_bound, modules) if bound is not None)
    return next(found, None)


def _slot(module: torch.nn.Module) -> str:
    """Return where an instance's forward is looked up; accelerate's hooks wrap the one that they found."""
    return "_old_forward" if "_old_forward" in module.__dict__ else "forward"


def _bound(module: torch.nn.Module) -> BoundForward | None:
    found = module.__dict__.get(_slot(module))
    return found.forward if isinstance(found, _Placed) else None


def _attend(
    backend: str,
    module: torch.nn.Module,
    cache: PolicyCache,
    query_BQTD: Tensor,
    keys_BHTD: Tensor,
    values_BHTD: Tensor,
    *,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    layer: Any = module.layer_idx
    keys, values = cache.update(keys_BHTD, values_BHTD, layer)
    arguments = {"scaling": scaling, "dropout": dropout}
    output_BTQD, _ = attend_layer(backend, module, query_BQTD, keys, values, MaskRecord.causal(), **arguments)
    return output_BTQD.flatten(2)


@lru_cache(maxsize=32)
def _parameters(forward: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(forward).parameters)
