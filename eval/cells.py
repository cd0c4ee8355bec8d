"""The grid of a sweep: one cell is one task at one length under one policy, budget and set of options."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..contract.canonical import sha256_of
from .sweep import NO_CONTEXT, BudgetValue, PolicySpec, SweepConfig, TaskSpec
from .tasks.base import ExampleRequest

__all__ = ["Cell", "TaskPoint", "cells_at", "same_rows", "settings_of", "task_points"]


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
    the question is a segment of its own. `matched_to` names policy, options and budget of the cell whose rows this one
    gets instead of a budget of its own: what is asked for, and not how many rows that comes to.
    """

    task: str
    length_tokens: int
    policy: str
    budget: BudgetValue
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    max_new_tokens: int = 16
    query_aware: bool = True
    matched_to: Mapping[str, Any] | None = None

    @property
    def source(self) -> Cell:
        """The cell that this one is matched to; itself where it is matched to none."""
        return self if self.matched_to is None else replace(self, **self.matched_to, matched_to=None)

    @property
    def is_full(self) -> bool:
        """Whether this is the full cache that others are measured by; one with options (rows in few bits) is not."""
        return self.policy == "full" and not self.options

    def coordinates(self) -> dict[str, Any]:
        """The cell as plain JSON."""
        found = {**asdict(self), "options": dict(self.options)}
        # What a cell does not use is left out: the keys of all others stay what they were.
        if self.matched_to is None:
            del found["matched_to"]
        return found

    def key(self, identity_sha256: str) -> str:
        """Digest of the cell under one model and prompt format; results with equal keys may be reused."""
        return sha256_of({"identity": identity_sha256, **self.coordinates()})[:16]

    @property
    def label(self) -> str:
        """Policy, options and budget for people."""
        options = ",".join(f"{name}={value}" for name, value in sorted(self.options.items()))
        budget = "" if self.budget is None else f" @ {self.budget}"
        if self.matched_to is not None:
            budget = f" @ rows of {self.source.label}"
        return f"{self.policy}{f'({options})' if options else ''}{budget}"


def same_rows(one: Cell, other: Cell) -> bool:
    """Whether two cells are asked for as many rows: one budget, or the rows that one of them or a third cell held."""
    if one.matched_to is None and other.matched_to is None:
        return one.budget == other.budget
    asked = [
        cell.matched_to or {"policy": cell.policy, "options": dict(cell.options), "budget": cell.budget}
        for cell in (one, other)
    ]
    return asked[0] == asked[1]


def settings_of(cells: Iterable[Cell]) -> Callable[[Cell], str]:
    """What tells cells of one task, length and label apart, as the end of a title: nothing that pools them is a result.

    Whether the question was unseen, and the length of answers where a task was run with several.
    """
    answers: dict[tuple[str, int], set[int]] = defaultdict(set)
    for cell in cells:
        answers[cell.task, cell.length_tokens].add(cell.max_new_tokens)

    def setting(cell: Cell) -> str:
        several = len(answers[cell.task, cell.length_tokens]) > 1
        answer = f", answers of {cell.max_new_tokens} tokens" if several else ""
        return f"{'' if cell.query_aware else ', question unseen'}{answer}"

    return setting


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
    """Every policy, option set and budget at one task point; the full cache first, a matched cell after its source."""
    for query_aware, policy in itertools.product(config.query_aware, config.policies):
        if policy.name == NO_CONTEXT and not point.request.max_new_tokens:
            # A task that generates nothing is its text: without it nothing is asked.
            continue
        for options, budget in itertools.product(_option_sets(policy), policy.budgets):
            cell = Cell(
                task=point.task.name,
                length_tokens=point.request.length_tokens,
                policy=policy.name,
                budget=budget,
                options=options,
                seed=point.request.seed,
                max_new_tokens=point.request.max_new_tokens,
                query_aware=query_aware,
            )
            yield cell
            asked = {"policy": policy.name, "options": options, "budget": budget}
            for baseline in policy.matched:
                yield replace(cell, policy=baseline, options={}, budget=None, matched_to=asked)


def _option_sets(policy: PolicySpec) -> Iterator[dict[str, Any]]:
    names = list(policy.grid)
    for values in itertools.product(*policy.grid.values()):
        yield {**policy.options, **dict(zip(names, values, strict=True))}
