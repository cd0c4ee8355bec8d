"""Runs a sweep: every cell, one row an example, written as it is known and never computed twice."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import torch

from ..contract.canonical import sha256_of
from ..errors import KVPolicyError
from . import acting, cells, environment, outcomes
from .cells import Cell, TaskPoint
from .engine import CacheBuilder
from .model_loading import LoadedModel
from .prompting import EncodedPrompt, PromptEncoder
from .records import Row, RunDirectory
from .sweep import SweepConfig
from .tasks.base import Example, to_dataset
from .tasks.registry import make_task
from .trial import run_trial

__all__ = ["RunOutcome", "run_sweep"]


@dataclasses.dataclass(slots=True, kw_only=True)
class RunOutcome:
    """Rows of this call: newly written, found done, and failed among the written."""

    written: int = 0
    skipped: int = 0
    failed: int = 0


class _Session:
    """What stays the same for the whole run."""

    def __init__(self, config: SweepConfig, loaded: LoadedModel, directory: RunDirectory) -> None:
        self.config, self.loaded, self.directory = config, loaded, directory
        self.encoder = PromptEncoder(loaded.tokenizer)
        self.identity = environment.identity(loaded, self.encoder)
        self.identity_sha256 = sha256_of(self.identity)
        self.versions = environment.package_versions()
        directory.begin(self._run_record())
        # A failed row is tried again: what failed may have been repaired.
        self.done = {row.row_key for row in directory.rows() if row.status in (outcomes.OK, outcomes.EQUALS_FULL)}

    def _run_record(self) -> dict[str, Any]:
        return {
            "sweep": dict(self.config.document),
            "sweep_sha256": sha256_of(self.config.document),
            "identity": self.identity,
            "identity_sha256": self.identity_sha256,
            "model_source": self.loaded.source,
            "device": str(self.loaded.model.device),
            "tasks": {task.name: dict(make_task(task.name, task.params).provenance) for task in self.config.tasks},
            "versions": self.versions,
            "threads": torch.get_num_threads(),
            "jobs": self.config.jobs,
            "delta": self.config.delta,
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
    say: Callable[[str], None] = print,
) -> RunOutcome:
    """Run what is not done yet of a sweep.

    Args:
        config: the checked sweep.
        loaded: model and tokenizer.
        directory: where rows go; rows found there are not computed again.
        build_cache: builds a fresh cache for every example.
        limit: at most so many examples per cell; None for all.
        part: (i, n) runs the i-th of n equal parts of every cell's examples, i from 1; n processes share a directory.
        say: receives one line a cell and warnings.
    """
    torch.set_num_threads(config.threads)
    warning = environment.oversubscription_warning(config.threads, config.jobs)
    if warning:
        say(f"warning: {warning}")
    session, outcome = _Session(config, loaded, directory), RunOutcome()
    chosen = slice(part[0] - 1, limit, part[1])
    for point in cells.task_points(config):
        task = make_task(point.task.name, point.task.params)
        examples = task.examples(point.request, session.encoder)
        _save_examples(session, point, examples)
        for cell in cells.cells_at(config, point):
            # By all examples of the point, so that all parts of a run agree.
            skips = _equals_full(session, cell, examples, build_cache)
            run_cell = _note_equal if skips else _run_cell
            said = run_cell(session, cell, task.metric, examples[chosen], build_cache, outcome)
            say(f"{cell.task} {cell.length_tokens} tokens, {cell.label}: {said}")
    return outcome


def _save_examples(session: _Session, point: TaskPoint, examples: list[Example]) -> None:
    """Keep the examples as a dataset file: the rows refer to them by id."""
    folder = session.directory.path / "examples"
    folder.mkdir(exist_ok=True)
    name = f"{point.task.name}-{point.request.length_tokens}-{point.request.seed}.jsonl"
    to_dataset(examples).to_pandas().to_json(folder / name, orient="records", lines=True)


def _equals_full(session: _Session, cell: Cell, examples: list[Example], build_cache: CacheBuilder) -> bool:
    """Whether the cell's budget takes nothing from any prompt; a cell that is refused is left to fail by itself."""
    cell_key = cell.key(session.identity_sha256)
    if cell.budget is None or all(_row_key(cell_key, example) in session.done for example in examples):
        return False
    prompts = (session.encoder.encode(example, query_aware=cell.query_aware).token_ids for example in examples)
    try:
        cache = build_cache(cell)
    except Exception:  # the cell's first example fails in the same way, and says so
        return False
    try:
        return acting.equals_full(cell, cache, session.loaded.model, (len(token_ids) for token_ids in prompts))
    except KVPolicyError:
        return False


def _note_equal(
    session: _Session,
    cell: Cell,
    metric: str,
    examples: list[Example],
    build_cache: CacheBuilder,
    outcome: RunOutcome,
) -> str:
    """Record that there was nothing to run: neither a result of the policy nor a failure of it."""
    cell_key, reason = cell.key(session.identity_sha256), "the budget takes nothing from any prompt"
    for example in examples:
        row_key = _row_key(cell_key, example)
        if row_key in session.done:
            outcome.skipped += 1
            continue
        encoded = session.encoder.encode(example, query_aware=cell.query_aware)
        blank = _blank_row(session, cell, metric, cell_key, row_key, example, encoded)
        equal = str(outcomes.Outcome.EQUALS_FULL)
        row = dataclasses.replace(blank, status=outcomes.EQUALS_FULL, outcome=equal, reason=reason)
        session.directory.append(row)
        outcome.written += 1
    return f"{outcomes.EQUALS_FULL} ({reason})"


def _run_cell(
    session: _Session,
    cell: Cell,
    metric: str,
    examples: list[Example],
    build_cache: CacheBuilder,
    outcome: RunOutcome,
) -> str:
    """Run the missing examples of one cell and return a short account of it."""
    cell_key, scores = cell.key(session.identity_sha256), []
    for example in examples:
        encoded = session.encoder.encode(example, query_aware=cell.query_aware)
        row_key = _row_key(cell_key, example)
        if row_key in session.done:
            outcome.skipped += 1
            continue
        row = _row(session, cell, metric, cell_key, row_key, example, encoded, build_cache)
        session.directory.append(row)
        outcome.written += 1
        if row.status != outcomes.OK:
            outcome.failed += 1
            # What the library refuses it refuses for every example of the cell.
            return f"{row.status} ({row.reason})"
        if row.quality is not None:
            scores.append(row.quality.score)
    return f"score {sum(scores) / len(scores):.2f} on {len(scores)} new" if scores else "done before"


def _row(
    session: _Session,
    cell: Cell,
    metric: str,
    cell_key: str,
    row_key: str,
    example: Example,
    encoded: EncodedPrompt,
    build_cache: CacheBuilder,
) -> Row:
    blank = _blank_row(session, cell, metric, cell_key, row_key, example, encoded)
    try:
        trial = run_trial(session.loaded, cell, example, encoded, lambda: build_cache(cell), metric=metric)
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
        )
    return dataclasses.replace(blank, quality=trial.quality, cache=trial.cache, timing=trial.timing)


def _row_key(cell_key: str, example: Example) -> str:
    return sha256_of([cell_key, example.example_id])[:16]


def _blank_row(
    session: _Session,
    cell: Cell,
    metric: str,
    cell_key: str,
    row_key: str,
    example: Example,
    encoded: EncodedPrompt,
) -> Row:
    return Row(
        row_key=row_key,
        cell_key=cell_key,
        cell=cell.coordinates(),
        example={**_example_record(example, encoded), "metric": metric},
        status=outcomes.OK,
        versions=session.versions,
    )


def _example_record(example: Example, encoded: EncodedPrompt) -> dict[str, Any]:
    return {
        **example.coordinates,
        "id": example.example_id,
        "answers": list(example.answers),
        "prompt_tokens": len(encoded.token_ids),
        "prompt_sha256": encoded.sha256,
        "truncated": example.dropped_tokens > 0,
        "dropped_tokens": example.dropped_tokens,
    }
