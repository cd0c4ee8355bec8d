"""Task names."""

from __future__ import annotations

from collections.abc import Callable

from ...errors import ConfigError, did_you_mean
from .base import Task
from .haystack import noise, pydoc_prose
from .needle import NeedleTask

__all__ = ["available_tasks", "make_task"]

# The haystack is part of the name: scores on Python's reference are not RULER scores.
_TASKS: dict[str, Callable[[str], Task]] = {
    "needle_single_noise": lambda name: NeedleTask(name=name, haystack=noise()),
    "needle_single_pydoc": lambda name: NeedleTask(name=name, haystack=pydoc_prose()),
    "needle_multikey_pydoc": lambda name: NeedleTask(name=name, haystack=pydoc_prose(), num_distractors=3),
}


def available_tasks() -> tuple[str, ...]:
    """Names that `make_task` accepts."""
    return tuple(_TASKS)


def make_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in _TASKS:
        raise ConfigError(f"There is no task {name!r}; available are {', '.join(_TASKS)}.{did_you_mean(name, _TASKS)}")
    return _TASKS[name](name)
