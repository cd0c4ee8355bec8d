"""One thread at a time changes a runtime, and a forward knows whether it is still the latest one."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

__all__ = ["SUPERSEDED", "Exclusive", "exclusive"]

SUPERSEDED = (
    "This forward is no longer the one in flight: another forward of the same cache began, or the cache was rolled "
    "back, before it ended. Use one cache for one forward at a time."
)


class Exclusive:
    """The lock, and the count of forwards begun, of an object that several threads may reach."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._forward = 0

    def note_begun(self) -> None:
        """Remember in this thread or task that it began the latest forward."""
        self._forward += 1
        _BEGUN.set((weakref.ref(self), self._forward))

    def note_ended(self) -> None:
        """Forget the forward of this thread or task."""
        _BEGUN.set(None)

    def begun_here(self) -> bool:
        """Whether this thread or task is inside a forward of this object."""
        begun = _BEGUN.get()
        return begun is not None and begun[0]() is self

    def is_latest(self) -> bool:
        """Whether no other forward of this object began since this thread's own."""
        begun = _BEGUN.get()
        return begun is not None and begun[0]() is self and begun[1] == self._forward


# The forward that this thread or task began: whose, and its number there.
_BEGUN: ContextVar[tuple[weakref.ref[Exclusive], int] | None] = ContextVar("hf_kvpolicy_begun", default=None)

_Self = TypeVar("_Self", bound=Exclusive)
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def exclusive(
    method: Callable[Concatenate[_Self, _Arguments], _Result],
) -> Callable[Concatenate[_Self, _Arguments], _Result]:
    """Method decorator: let one thread at a time run the methods of an object that carry it."""

    @wraps(method)
    def run(self: _Self, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        with self._lock:
            return method(self, *args, **kwargs)

    return run
