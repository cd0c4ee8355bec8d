"""What ties one forward's hook, mask function, update and attention call together.

ContextVars, not module attributes: two caches on one model and two threads never see each other's. References to the
cache are weak, so a finished forward keeps nothing alive.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from torch import Tensor

    from .cache import PolicyCache

__all__ = [
    "FRAME",
    "READER",
    "STEP",
    "KeptTokens",
    "LayerRun",
    "LayerStep",
    "Reader",
    "active_cache",
    "enter_forward",
    "leave_forward",
    "take_reader",
    "weakly",
]

_T = TypeVar("_T")

FRAME: ContextVar[weakref.ref[PolicyCache] | None] = ContextVar("hf_kvpolicy_frame", default=None)


class LayerStep:
    """The hand-over from `cache.update` to the attention call of the same layer."""

    __slots__ = ("foreign", "keys", "layer", "model_layer", "run", "values")

    def __init__(
        self, run: Any, layer: int, keys: Tensor, values: Tensor, *, model_layer: int, foreign: bool = False
    ) -> None:
        self.run = run
        # Its number among the layers the policy acts on, or (foreign) among the others; and the model's own number.
        self.layer, self.foreign, self.model_layer = layer, foreign, model_layer
        self.keys = keys
        self.values = values


STEP: ContextVar[LayerStep | None] = ContextVar("hf_kvpolicy_step", default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """The outer model's call around a decoder's forward, and what it reads of that one's output."""

    # The policy cache it was given: a forward with another one is none of this call's.
    cache: weakref.ref[PolicyCache]
    has_labels: bool
    # As the call gives it; 0 is every position. None for a call whose head does not choose.
    logits_to_keep: Any
    # The call's tokens, which a decoder behind images is given as embeddings.
    input_ids: Tensor | None = None
    # The names of its arguments that hold tensors.
    brings: frozenset[str] = frozenset()


READER: ContextVar[Reader | None] = ContextVar("hf_kvpolicy_reader", default=None)


def take_reader(cache: PolicyCache | None) -> Reader | None:
    """Return who calls the decoder with this cache, once; None where nobody does."""
    found = READER.get()
    READER.set(None)
    return found if found is not None and found.cache() is cache else None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeptTokens:
    """Which of a forward's tokens the next decoder layer computes; int64 indices of a batch's rectangle [B, W]."""

    # Where they lie among the tokens the layer before computed; None when those are all of them.
    among_present_BW: Tensor | None
    # Where they lie among all of the forward's tokens.
    among_new_BW: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """One run of the decoder's layers among several of one forward."""

    # The forward's tokens that it computes.
    tokens: slice
    # Whether what it computes is part of the forward's output; else only its rows are of use, to the next run.
    is_output: bool


def enter_forward(cache: PolicyCache | None) -> None:
    """Open a forward: remember whose it is and forget what a dead forward may have left."""
    FRAME.set(None if cache is None else weakref.ref(cache))
    STEP.set(None)


def active_cache() -> PolicyCache | None:
    """Return the policy cache of the forward that runs in this context, or None."""
    reference = FRAME.get()
    return None if reference is None else reference()


def weakly(method: Callable[[], _T]) -> Callable[[], _T]:
    """Return a bound method that does not keep its cache alive: a cycle would hold buffers until a collection runs."""
    reference = weakref.WeakMethod(method)

    def call() -> _T:
        found = reference()
        assert found is not None, "a runtime runs only while its cache lives"
        return found()

    return call


def leave_forward() -> None:
    """Close a forward: a later mask or attention call of another model must not meet it."""
    FRAME.set(None)
