"""Runs a sweep: every example under every cell, one row each, written as it is known and never computed twice."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Protocol

import torch

from ..cache import PolicyCache
from ..contract.canonical import sha256_of
from ..errors import KVPolicyError
from . import acting, cells, environment, matching, outcomes
from .canary import canary_warning, run_canary
from .cells import Cell
from .dense_prompts import DensePrompts
from .engine import CacheBuilder
from .model_loading import LoadedModel
from .policy_coordinates import policy_coordinates
from .progress import Progress
from .prompt_ids import check_prompt_ids
from .prompting import EncodedPrompt, PromptEncoder
from .records import Row
from .run_directory import RunDirectory
from .sweep import NO_CONTEXT, SweepConfig
from .tasks.base import Example, Task, to_dataset, without_context
from .tasks.registry import make_task
from .trial import run_trial

__all__ = ["Listener", "RunOutcome", "SweepWorker", "run_part", "run_sweep"]


@dataclasses.dataclass(slots=True, kw_only=True)
class RunOutcome:
    """Rows of this call: newly written, found done, and failed among the written."""

    written: int = 0
    skipped: int = 0
    failed: int = 0

    def add(self, other: RunOutcome) -> None:
        """Count another outcome's rows in."""
        self.written += other.written
        self.skipped += other.skipped
        self.failed += other.failed

    def __str__(self) -> str:
        return f"{self.written} rows written, {self.skipped} done before, {self.failed} failed"


class Listener(Protocol):
    """Hears of every new row of an example."""

    def scored(self, label: str, score: float) -> None:
        """A cell answered."""
        ...

    def failed(self, label: str, reason: str) -> None:
        """A cell failed, and is not run again."""
        ...


@dataclasses.dataclass(slots=True, kw_only=True)
class _PlannedCell:
    """One cell and how it goes. What the library refuses it refuses for every example of the cell."""

    cell: Cell
    key: str
    # Of the cell whose rows it gets; its own where it gets none.
    source_key: str
    # Of all examples of the task point, so that all parts of a run agree.
    prompt_tokens: list[int]
    refused: bool = False
    # Unknown until a cache is built for it.
    equals_full: bool | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class _OpenPoint:
    """The task point a worker is at: its examples stay until it goes to another."""

    index: int
    task: Task
    examples: list[Example]
    planned: list[_PlannedCell]


class SweepWorker:
    """A sweep as one worker sees it: any example of any task point, under every cell that has not seen it."""

    def __init__(
        self,
        config: SweepConfig,
        loaded: LoadedModel,
        directory: RunDirectory,
        build_cache: CacheBuilder,
        *,
        allow_mixed: bool = False,
        jobs: int = 1,
    ) -> None:
        """Begin, or continue, the folder of the run. Of several workers the one that leads does so before the others.

        Args: as `run_sweep`; `jobs` counts the processes on this machine, where the sweep does not name more.

        Raises:
            ConfigError: the folder belongs to another model, or its rows ran elsewhere.
            IntegrityError: the canary, run first in every environment of the folder, found a fault.
        """
        torch.set_num_threads(config.threads)
        self.config, self.loaded, self.directory, self.build = config, loaded, directory, build_cache
        self.jobs = max(config.jobs, jobs)
        self.points = list(cells.task_points(config))
        self.encoder = PromptEncoder(loaded.tokenizer)
        self.identity = environment.identity(loaded, self.encoder)
        self.identity_sha256 = sha256_of(self.identity)
        place = environment.describe(loaded, threads=config.threads, jobs=self.jobs)
        self.environment = sha256_of(place)[:12]
        if not allow_mixed:
            environment.check_same(place, directory.environments().values())
        directory.begin(self._run_record())
        directory.add_environment(self.environment, place)
        self.canary = self._canary()
        self._cells = self._open_cells()
        self._point: _OpenPoint | None = None
        self.find_done()

    def find_done(self) -> None:
        """Read which rows are there. A failed one is tried again: what failed may have been repaired."""
        rows = self.directory.rows()
        self.done = {row.row_key: matching.finished(row) for row in rows if row.status in outcomes.DONE}

    def run(self, point: int, number: int, listener: Listener) -> RunOutcome:
        """Run the `number`-th example of the `point`-th task point; every row is on disk when this returns.

        A task may have fewer examples than it is asked for: then there is nothing to run.
        """
        opened, outcome = self._opened(point), RunOutcome()
        if number >= len(opened.examples):
            return outcome
        example = opened.examples[number]
        dense = DensePrompts(self.loaded.model, share=self.config.share_prefill)

        @functools.cache
        def encode(query_aware: bool) -> EncodedPrompt:
            # Every cell asks for it; a long text is tokenised once.
            return self.encoded(example, query_aware=query_aware)

        for entry in opened.planned:
            row_key = _row_key(entry.key, example)
            if row_key in self.done:
                outcome.skipped += 1
                continue
            if entry.refused:
                continue
            row = _row(self, entry, opened.task, number, example, row_key, dense, encode)
            self.directory.append(row)
            outcome.written += 1
            if row.status not in outcomes.DONE:
                outcome.failed += 1
                entry.refused = True
                listener.failed(entry.cell.label, f"{row.status} ({row.reason})")
                continue
            self.done[row_key] = matching.finished(row)
            if row.quality is not None:
                listener.scored(entry.cell.label, row.quality.score)
        return outcome

    def encoded(self, example: Example, *, query_aware: bool) -> EncodedPrompt:
        """The prompt of an example, checked against its text.

        Raises:
            ConfigError: it has a token that its text does not have.
        """
        found = self.encoder.encode(example, query_aware=query_aware)
        check_prompt_ids(self.loaded.tokenizer, example, found)
        return found

    def _canary(self) -> dict[str, Any]:
        """What the full cache answers in this environment, asked once a folder."""
        found = self.directory.canary(self.environment)
        if found is None:
            found = run_canary(self.loaded, self.encoder, self.build, share=self.config.share_prefill)
            self.directory.add_canary(self.environment, found)
        return found

    def _run_record(self) -> dict[str, Any]:
        return {
            "sweep": dict(self.config.document),
            "sweep_sha256": sha256_of(self.config.document),
            "identity": self.identity,
            "identity_sha256": self.identity_sha256,
            "model_source": self.loaded.source,
            "tasks": {task.name: dict(make_task(task.name, task.params).provenance) for task in self.config.tasks},
            "delta": self.config.delta,
            "decode_mode": "greedy",
            "nll_mode": "the gold answer fed token by token",
            "parallelism": "one device a process",
            "evidence_class": "locally measured",
            "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _open_cells(self) -> list[list[tuple[Cell, str]]]:
        """The cells of every task point with their keys; the order in the sweep is that in tables."""
        found, order = [], itertools.count()
        for point in self.points:
            keyed = [(cell, cell.key(self.identity_sha256)) for cell in cells.cells_at(self.config, point)]
            for cell, key in keyed:
                self.directory.open_cell(cell, key, next(order))
            found.append(keyed)
        return found

    def _opened(self, index: int) -> _OpenPoint:
        if self._point is None or self._point.index != index:
            point = self.points[index]
            task = make_task(point.task.name, point.task.params)
            examples = task.examples(point.request, self.encoder)
            name = f"{point.task.name}-{point.request.length_tokens}-{point.request.seed}"
            self.directory.save_examples(name, to_dataset(examples).to_pandas().to_json(orient="records", lines=True))
            prompt_tokens = [len(self.encoder.encode(example).token_ids) for example in examples]
            planned = [
                _PlannedCell(
                    cell=cell,
                    key=key,
                    source_key=cell.source.key(self.identity_sha256),
                    prompt_tokens=prompt_tokens,
                )
                for cell, key in self._cells[index]
            ]
            self._point = _OpenPoint(index=index, task=task, examples=examples, planned=planned)
        return self._point


def run_sweep(
    config: SweepConfig,
    loaded: LoadedModel,
    directory: RunDirectory,
    build_cache: CacheBuilder,
    *,
    limit: int | None = None,
    part: tuple[int, int] = (1, 1),
    allow_mixed: bool = False,
    say: Callable[[str], None] = print,
) -> RunOutcome:
    """Run what is not done yet of a sweep.

    Args:
        config: the checked sweep.
        loaded: model and tokenizer.
        directory: where rows go; rows found there are not computed again.
        build_cache: builds a fresh cache for every example.
        limit: at most so many examples per cell; None for all.
        part: (i, n) runs the i-th of n equal parts of every cell's examples, i from 1; n processes share a folder.
        allow_mixed: add to rows that ran with other versions or on other hardware.
        say: receives one line an example, and warnings.

    Raises:
        ConfigError: the folder belongs to another model, or its rows ran elsewhere.
    """
    worker = SweepWorker(config, loaded, directory, build_cache, allow_mixed=allow_mixed)
    return run_part(worker, limit=limit, part=part, say=say)


def run_part(
    worker: SweepWorker, *, limit: int | None, part: tuple[int, int], say: Callable[[str], None]
) -> RunOutcome:
    """Run one part of every cell's examples, in order, and say how far it is; see `run_sweep`."""
    outcome = RunOutcome()
    warnings = (
        environment.oversubscription_warning(worker.config.threads, worker.jobs),
        canary_warning(worker.canary),
    )
    for warning in filter(None, warnings):
        say(f"warning: {warning}")
    numbers = [range(point.request.num_examples)[slice(part[0] - 1, limit, part[1])] for point in worker.points]
    progress = Progress(say, [len(each) for each in numbers])
    for index, point in enumerate(worker.points):
        progress.begin(index, point.title)
        for number in numbers[index]:
            outcome.add(worker.run(index, number, progress))
            progress.example_done()
        progress.end()
    return outcome


def _row(
    worker: SweepWorker,
    entry: _PlannedCell,
    task: Task,
    number: int,
    example: Example,
    row_key: str,
    dense: DensePrompts,
    encode: Callable[[bool], EncodedPrompt],
) -> Row:
    cell, source = entry.cell, worker.done.get(_row_key(entry.source_key, example))
    with_context = encode(cell.query_aware)
    asked = without_context(example) if cell.policy == NO_CONTEXT else example
    encoded = with_context if asked is example else worker.encoded(asked, query_aware=cell.query_aware)
    blank = Row(
        row_key=row_key,
        cell_key=entry.key,
        cell=cell.coordinates(),
        example={**_example_record(example, encoded), "index": number, "metric": task.metric},
        status=outcomes.OK,
        environment=worker.environment,
    )
    if entry.equals_full is None:
        entry.equals_full = matching.source_equals_full(source) if cell.matched_to else _equals_full(worker, entry)
    if entry.equals_full:
        # Neither a result of the policy nor a failure of it.
        reason, equal = "the budget takes nothing from any prompt", str(outcomes.Outcome.EQUALS_FULL)
        return dataclasses.replace(blank, status=outcomes.EQUALS_FULL, outcome=equal, reason=reason)
    try:
        budgeted = matching.with_budget(cell, source)
        cache = worker.build(budgeted)
        declared = matching.declared_of(cell, policy_coordinates(cache)) if isinstance(cache, PolicyCache) else {}
        trial = run_trial(
            worker.loaded, budgeted, asked, encoded, cache, metric=task.metric, dense=dense, beside=with_context
        )
    except Exception as error:  # a failing cell is a result, and the sweep goes on
        return dataclasses.replace(
            blank,
            status=outcomes.status_of_error(error),
            outcome=str(outcomes.outcome_of_error(error)),
            reason=f"{type(error).__name__}: {error}"[:500],
        )
    if trial.did_not_act is not None:
        return dataclasses.replace(
            blank,
            status=outcomes.DID_NOT_ACT,
            outcome=str(outcomes.Outcome.UNMEASURED),
            reason=trial.did_not_act,
            cache=trial.cache,
            policy=declared,
        )
    return dataclasses.replace(blank, quality=trial.quality, cache=trial.cache, timing=trial.timing, policy=declared)


def _row_key(cell_key: str, example: Example) -> str:
    return sha256_of([cell_key, example.example_id])[:16]


def _equals_full(worker: SweepWorker, entry: _PlannedCell) -> bool:
    """Whether the cell's budget takes nothing from any prompt; a cell that is refused is left to fail by itself."""
    if entry.cell.budget is None:
        return False
    try:
        cache = worker.build(entry.cell)
    except Exception:  # the cell's first example fails in the same way, and says so
        return False
    try:
        return acting.equals_full(entry.cell, cache, worker.loaded.model, entry.prompt_tokens)
    except KVPolicyError:
        return False


def _example_record(example: Example, encoded: EncodedPrompt) -> dict[str, Any]:
    return {
        **example.coordinates,
        "id": example.example_id,
        "answers": list(example.answers),
        "prompt_tokens": len(encoded.token_ids),
        "prompt_sha256": encoded.sha256,
        "template_preamble": encoded.template_preamble,
        "added_bos_tokens": encoded.added_bos_tokens,
        "segments": len(encoded.segment_ends),
        "truncated": example.dropped_tokens > 0,
        "dropped_tokens": example.dropped_tokens,
    }
