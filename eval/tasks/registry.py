"""Task names, what each may be told, and how it is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError, did_you_mean
from . import (
    copying,
    delayed,
    factbook,
    fewshot,
    heatmap,
    longbench,
    needle,
    perplexity,
    ruler_niah,
    ruler_qa,
    ruler_trace,
    ruler_words,
)
from .base import Task, TaskEntry

__all__ = ["available_tasks", "make_task", "task_entry", "task_families"]

# One mapping a family of tasks; a name belongs to one family.
_FAMILIES: Mapping[str, Mapping[str, TaskEntry]] = {
    "needle": needle.ENTRIES,
    "needle heat map": heatmap.ENTRIES,
    "RULER": {**ruler_niah.ENTRIES, **ruler_trace.ENTRIES, **ruler_words.ENTRIES, **ruler_qa.ENTRIES},
    "LongBench": longbench.ENTRIES,
    "delayed reference": delayed.ENTRIES,
    "verbatim text": copying.ENTRIES,
    "few-shot": fewshot.ENTRIES,
    "document QA": factbook.ENTRIES,
    "perplexity": perplexity.ENTRIES,
}
_ENTRIES: dict[str, TaskEntry] = {name: entry for family in _FAMILIES.values() for name, entry in family.items()}


def task_families() -> Mapping[str, Mapping[str, TaskEntry]]:
    """All tasks, grouped by family."""
    return _FAMILIES


def available_tasks() -> tuple[str, ...]:
    """Names that `make_task` accepts."""
    return tuple(_ENTRIES)


def task_entry(name: str) -> TaskEntry:
    """Return what is known of a task without making it.

    Raises:
        ConfigError: there is no such task.
    """
    if name not in _ENTRIES:
        raise ConfigError(
            f"There is no task {name!r}; available are {', '.join(_ENTRIES)}.{did_you_mean(name, _ENTRIES)}"
        )
    return _ENTRIES[name]


def make_task(name: str, params: Mapping[str, Any] | None = None) -> Task:
    """Return the task of that name.

    Args:
        name: one of `available_tasks()`.
        params: what the task is told beyond length, depths and seed, such as where its data lies.

    Raises:
        ConfigError: there is no such task, it takes no such parameter, or its data is not where the parameter says.
    """
    entry, given = task_entry(name), dict(params or {})
    unknown = [key for key in given if key not in entry.params]
    if unknown:
        raise ConfigError(
            f"Task {name!r} takes no parameter {unknown[0]!r}; it takes {', '.join(entry.params) or 'none'}."
            f"{did_you_mean(unknown[0], entry.params)}"
        )
    return entry.make(name, **given)
