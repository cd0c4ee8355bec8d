"""The grid of a sweep: one cell is one task at one length under one policy, budget and set of options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..contract.canonical import sha256_of
from .sweep import BudgetValue, PolicySpec, SweepConfig, TaskSpec
from .tasks.base import ExampleRequest

__all__ = ["Cell", "TaskPoint", "cells_at", "task_points"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskPoint:
    """A task at one length and seed: all policies see the same examples of it."""

    task: TaskSpec
    request: ExampleRequest

    @property
    def title(self) -> str:
        """Task and length for people."""
        return f"{self.task.name} {self.request.length_tokens} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """Coordinates that every row of the cell shares.

    `query_aware` says whether the question is in the prompt when rows are selected; else the text is fed first, and
    the question is a segment of its own.
    """

    task: str
    length_tokens: int
    policy: str
    budget: BudgetValue
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    max_new_tokens: int = 16
    query_aware: bool = True

    def coordinates(self) -> dict[str, Any]:
        """The cell as plain JSON."""
        return {**asdict(self), "options": dict(self.options)}

    def key(self, identity_sha256: str) -> str:
        """Digest of the cell under one model and prompt format; results with equal keys may be reused."""
        return sha256_of({"identity": identity_sha256, **self.coordinates()})[:16]

    @property
    def label(self) -> str:
        """Policy, options and budget for people."""
        options = ",".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        budget = "" if self.budget is None else f" @ {self.budget}"
        return f"{self.policy}{f'({options})' if options else ''}{budget}"


def task_points(config: SweepConfig) -> Iterator[TaskPoint]:
    """Every task, length and seed, shortest lengths of a task first."""
    for task in config.tasks:
        for length, seed in itertools.product(sorted(task.lengths_tokens), config.seeds):
            request = ExampleRequest(
                length_tokens=length,
                depths=task.depths,
                num_examples=task.num_examples,
                max_new_tokens=task.max_new_tokens,
                seed=seed,
            )
            yield TaskPoint(task=task, request=request)


def cells_at(config: SweepConfig, point: TaskPoint) -> Iterator[Cell]:
    """Every policy, option set and budget at one task point; the full cache comes first."""
    for query_aware, policy in itertools.product(config.query_aware, config.policies):
        for options, budget in itertools.product(_option_sets(policy), policy.budgets):
            yield Cell(
                task=point.task.name,
                length_tokens=point.request.length_tokens,
                policy=policy.name,
                budget=budget,
                options=options,
                seed=point.request.seed,
                max_new_tokens=point.request.max_new_tokens,
                query_aware=query_aware,
            )


def _option_sets(policy: PolicySpec) -> Iterator[dict[str, Any]]:
    names = list(policy.grid)
    for values in itertools.product(*policy.grid.values()):
        yield {**policy.options, **dict(zip(names, values, strict=True))}
