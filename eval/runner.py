"""Runs a sweep: every example under every cell, one row each, written as it is known and never computed twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from ..cache import PolicyCache
from ..contract.canonical import sha256_of
from ..errors import KVPolicyError
from . import acting, cells, environment, outcomes
from .cells import Cell, TaskPoint
from .dense_prompts import DensePrompts
from .engine import CacheBuilder
from .model_loading import LoadedModel
from .policy_coordinates import policy_coordinates
from .progress import Progress
from .prompting import EncodedPrompt, PromptEncoder
from .records import Row
from .run_directory import RunDirectory
from .sweep import SweepConfig
from .tasks.base import Example, Task, to_dataset
from .tasks.registry import make_task
from .trial import run_trial

__all__ = ["RunOutcome", "run_sweep"]


@dataclasses.dataclass(slots=True, kw_only=True)
class RunOutcome:
    """Rows of this call: newly written, found done, and failed among the written."""

    written: int = 0
    skipped: int = 0
    failed: int = 0


@dataclasses.dataclass(slots=True, kw_only=True)
class _PlannedCell:
    """One cell and how it goes. What the library refuses it refuses for every example of the cell."""

    cell: Cell
    key: str
    # Of all examples of the task point, so that all parts of a run agree.
    prompt_tokens: list[int]
    refused: bool = False
    # Unknown until a cache is built for it.
    equals_full: bool | None = None


class _Session:
    """What stays the same for the whole run."""

    def __init__(
        self, config: SweepConfig, loaded: LoadedModel, directory: RunDirectory, build: CacheBuilder, mixed: bool
    ) -> None:
        self.config, self.loaded, self.directory, self.build = config, loaded, directory, build
        self.encoder = PromptEncoder(loaded.tokenizer)
        self.identity = environment.identity(loaded, self.encoder)
        self.identity_sha256 = sha256_of(self.identity)
        place = environment.describe(loaded, threads=config.threads, jobs=config.jobs)
        self.environment = sha256_of(place)[:12]
        if not mixed:
            environment.check_same(place, directory.environments().values())
        directory.begin(self._run_record())
        directory.add_environment(self.environment, place)
        # A failed row is tried again: what failed may have been repaired.
        self.done = {row.row_key for row in directory.rows() if row.status in outcomes.DONE}

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
    torch.set_num_threads(config.threads)
    warning = environment.oversubscription_warning(config.threads, config.jobs)
    if warning:
        say(f"warning: {warning}")
    session, outcome = _Session(config, loaded, directory, build_cache, allow_mixed), RunOutcome()
    points = list(cells.task_points(config))
    progress = Progress(say, [_examples_here(point, limit, part) for point in points])
    first_order = 0
    for index, point in enumerate(points):
        task = make_task(point.task.name, point.task.params)
        examples = task.examples(point.request, session.encoder)
        _save_examples(session, point, examples)
        planned = _plan(session, point, examples, first_order)
        first_order += len(planned)
        progress.begin(index, f"{point.task.name} {point.request.length_tokens} tokens")
        for number in range(len(examples))[slice(part[0] - 1, limit, part[1])]:
            _run_example(session, planned, task, number, examples[number], outcome, progress)
            progress.example_done()
        progress.end()
    return outcome


def _examples_here(point: TaskPoint, limit: int | None, part: tuple[int, int]) -> int:
    return len(range(point.request.num_examples)[slice(part[0] - 1, limit, part[1])])


def _save_examples(session: _Session, point: TaskPoint, examples: list[Example]) -> None:
    """Keep the examples as a dataset file: the rows refer to them by id."""
    folder = session.directory.path / "examples"
    folder.mkdir(exist_ok=True)
    name = f"{point.task.name}-{point.request.length_tokens}-{point.request.seed}.jsonl"
    to_dataset(examples).to_pandas().to_json(folder / name, orient="records", lines=True)


def _plan(session: _Session, point: TaskPoint, examples: list[Example], first_order: int) -> list[_PlannedCell]:
    """The cells of a task point, in order."""
    prompt_tokens = [len(session.encoder.encode(example).token_ids) for example in examples]
    planned = []
    for order, cell in enumerate(cells.cells_at(session.config, point), first_order):
        entry = _PlannedCell(cell=cell, key=cell.key(session.identity_sha256), prompt_tokens=prompt_tokens)
        session.directory.open_cell(cell, entry.key, order)
        planned.append(entry)
    return planned


def _run_example(
    session: _Session,
    planned: list[_PlannedCell],
    task: Task,
    number: int,
    example: Example,
    outcome: RunOutcome,
    progress: Progress,
) -> None:
    """Run one example under every cell that has not seen it."""
    dense = DensePrompts(session.loaded.model, share=session.config.share_prefill)
    for entry in planned:
        row_key = sha256_of([entry.key, example.example_id])[:16]
        if row_key in session.done:
            outcome.skipped += 1
            continue
        if entry.refused:
            continue
        row = _row(session, entry, task, number, example, row_key, dense)
        session.directory.append(row)
        outcome.written += 1
        if row.status not in outcomes.DONE:
            outcome.failed += 1
            entry.refused = True
            progress.failed(entry.cell.label, f"{row.status} ({row.reason})")
        elif row.quality is not None:
            progress.scored(entry.cell.label, row.quality.score)


def _row(
    session: _Session,
    entry: _PlannedCell,
    task: Task,
    number: int,
    example: Example,
    row_key: str,
    dense: DensePrompts,
) -> Row:
    cell = entry.cell
    encoded = session.encoder.encode(example, query_aware=cell.query_aware)
    blank = Row(
        row_key=row_key,
        cell_key=entry.key,
        cell=cell.coordinates(),
        example={**_example_record(example, encoded), "index": number, "metric": task.metric},
        status=outcomes.OK,
        environment=session.environment,
    )
    if entry.equals_full is None:
        entry.equals_full = _equals_full(session, entry)
    if entry.equals_full:
        # Neither a result of the policy nor a failure of it.
        reason, equal = "the budget takes nothing from any prompt", str(outcomes.Outcome.EQUALS_FULL)
        return dataclasses.replace(blank, status=outcomes.EQUALS_FULL, outcome=equal, reason=reason)
    try:
        cache = session.build(cell)
        declared = policy_coordinates(cache) if isinstance(cache, PolicyCache) else {}
        trial = run_trial(session.loaded, cell, example, encoded, cache, metric=task.metric, dense=dense)
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


def _equals_full(session: _Session, entry: _PlannedCell) -> bool:
    """Whether the cell's budget takes nothing from any prompt; a cell that is refused is left to fail by itself."""
    if entry.cell.budget is None:
        return False
    try:
        cache = session.build(entry.cell)
    except Exception:  # the cell's first example fails in the same way, and says so
        return False
    try:
        return acting.equals_full(entry.cell, cache, session.loaded.model, entry.prompt_tokens)
    except KVPolicyError:
        return False


def _example_record(example: Example, encoded: EncodedPrompt) -> dict[str, Any]:
    return {
        **example.coordinates,
        "id": example.example_id,
        "answers": list(example.answers),
        "prompt_tokens": len(encoded.token_ids),
        "prompt_sha256": encoded.sha256,
        "segments": len(encoded.segment_ends),
        "truncated": example.dropped_tokens > 0,
        "dropped_tokens": example.dropped_tokens,
    }
