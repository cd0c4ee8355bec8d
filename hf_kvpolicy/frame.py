"""What ties one forward's hook, mask function, update and attention call together.

ContextVars, not module attributes: two caches on one model and two threads never see each other's. References to the
cache are weak, so a finished forward keeps nothing alive.
"""

from __future__ import annotations

import weakref
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from .cache import PolicyCache

__all__ = ["FRAME", "STEP", "LayerStep", "active_cache", "enter_forward", "leave_forward"]

FRAME: ContextVar[weakref.ref[PolicyCache] | None] = ContextVar("hf_kvpolicy_frame", default=None)


class LayerStep:
    """The hand-over from `cache.update` to the attention call of the same layer."""

    __slots__ = ("keys", "layer", "run", "values")

    def __init__(self, run: Any, layer: int, keys: Tensor, values: Tensor) -> None:
        self.run = run
        self.layer = layer
        self.keys = keys
        self.values = values


STEP: ContextVar[LayerStep | None] = ContextVar("hf_kvpolicy_step", default=None)


def enter_forward(cache: PolicyCache | None) -> None:
    """Open a forward: remember whose it is and forget what a dead forward may have left."""
    FRAME.set(None if cache is None else weakref.ref(cache))
    STEP.set(None)


def active_cache() -> PolicyCache | None:
    """Return the policy cache of the forward that runs in this context, or None."""
    reference = FRAME.get()
    return None if reference is None else reference()


def leave_forward() -> None:
    """Close a forward: a later mask or attention call of another model must not meet it."""
    FRAME.set(None)
