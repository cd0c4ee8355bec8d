"""Runs a sweep: every example under every cell, one row each, written as it is known and never computed twice."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import torch

from ..contract.canonical import sha256_of
from . import cells, environment, matching, outcomes
from .answer_room import answer_room_note
from .canary import canary_warning, run_canary
from .cells import Cell
from .changed_sweep import changed_sweep_note
from .dense_prompts import DensePrompts
from .engine import CacheBuilder
from .example_rows import PlannedCell, equals_full, row_key_of, run_example
from .model_loading import LoadedModel
from .progress import Listener, Progress
from .prompt_ids import check_prompt_ids
from .prompting import EncodedPrompt, PromptEncoder
from .run_directory import RunDirectory
from .sweep import REFERENCES, SweepConfig
from .tasks.base import Example, Task, to_dataset
from .tasks.registry import make_task

__all__ = ["Listener", "RunOutcome", "SweepWorker", "run_part", "run_sweep"]


_TRAINED = (
    "This checkpoint was trained for {0!r}. The full cache and other policies would read its rows wrongly and are "
    "refused: their cells are checkpoint-incompatible, and what {0!r} scores has no full cache beside it."
)


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


@dataclasses.dataclass(slots=True, kw_only=True)
class _OpenPoint:
    """The task point a worker is at: its examples stay until it goes to another."""

    index: int
    task: Task
    examples: list[Example]
    planned: list[PlannedCell]
    note: str | None


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
        before, found = directory.sweep(), directory.cell_keys()
        directory.begin(self._run_record())
        directory.add_environment(self.environment, place)
        self.canary = self._canary()
        self._cells = self._open_cells()
        asked = frozenset(key for keyed in self._cells for _, key in keyed)
        self._note = changed_sweep_note(before, config.document, found=found, asked=asked)
        self._point: _OpenPoint | None = None
        self._prompt_tokens: dict[int, list[int]] = {}
        self.find_done()

    def warnings(self) -> list[str]:
        """What is to be known before the first row."""
        trained = self.loaded.trained_policy
        found = (
            environment.oversubscription_warning(self.config.threads, self.jobs),
            canary_warning(self.canary),
            None if trained is None else _TRAINED.format(trained),
            self._note,
        )
        return [warning for warning in found if warning is not None]

    def find_done(self) -> None:
        """Read which rows are there. A failed one is tried again: what failed may have been repaired."""
        rows = self.directory.rows()
        self.done = {row.row_key: matching.finished(row) for row in rows if row.status in outcomes.DONE}
        # The longest prompt of each cell that its budget was found to take nothing from.
        self._held_tokens: dict[str, int] = {}
        for row in rows:
            if row.status == outcomes.EQUALS_FULL:
                tokens = max(self._held_tokens.get(row.cell_key, 0), row.example["prompt_tokens"])
                self._held_tokens[row.cell_key] = tokens

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
            row_key = row_key_of(entry.key, example)
            if self._is_done(entry, row_key, example):
                outcome.skipped += 1
                continue
            if entry.refused:
                continue
            if opened.note is not None:
                listener.noted(opened.note)
                opened.note = None
            row = run_example(self, entry, opened.task, number, example, row_key, dense, encode)
            self.directory.append(row)
            outcome.written += 1
            if row.status not in outcomes.DONE:
                # What a checkpoint cannot be compared with was put there by the harness, and is no mistake.
                outcome.failed += not (self.loaded.trained_policy and entry.cell.policy in REFERENCES)
                entry.refused = True
                listener.failed(entry.cell.label, f"{row.status} ({row.reason})")
                continue
            self.done[row_key] = matching.finished(row)
            if row.quality is not None:
                listener.scored(entry.cell.label, row.quality.score)
        return outcome

    def _is_done(self, entry: PlannedCell, row_key: str, example: Example) -> bool:
        """Whether a row need not be run: of one whose budget took nothing, unless it now takes something of others."""
        found = self.done.get(row_key)
        if found is None or found.status != outcomes.EQUALS_FULL:
            return found is not None
        if entry.cell.matched_to is not None:
            return matching.source_equals_full(self.done.get(row_key_of(entry.source_key, example)))
        if entry.equals_full is None and max(entry.prompt_tokens()) > self._held_tokens.get(entry.key, 0):
            entry.equals_full = equals_full(self, entry)
        return entry.equals_full is not False

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
            encoded = [self.encoder.encode(example) for example in examples]
            self._prompt_tokens[index] = [len(each.token_ids) for each in encoded]
            planned = [
                PlannedCell(
                    cell=cell,
                    key=key,
                    source_key=cell.source.key(self.identity_sha256),
                    prompt_tokens=functools.partial(self._tokens_of_all_seeds, index),
                )
                for cell, key in self._cells[index]
            ]
            note = answer_room_note(
                point.title,
                answer_tokens=[len(each.answer_ids) for each in encoded],
                values=[example.answers for example in examples],
                metric=task.metric,
                max_new_tokens=point.request.max_new_tokens,
            )
            self._point = _OpenPoint(index=index, task=task, examples=examples, planned=planned, note=note)
        return self._point

    def _tokens_of_all_seeds(self, index: int) -> Iterator[int]:
        """Tokens of every prompt of a cell, whose seeds are pooled; other seeds' are made when asked for."""
        own = self.points[index]
        for other, point in sorted(enumerate(self.points), key=lambda entry: entry[0] != index):
            if point.task is not own.task or point.request.length_tokens != own.request.length_tokens:
                continue
            if other not in self._prompt_tokens:
                task = make_task(point.task.name, point.task.params)
                self._prompt_tokens[other] = self._count(task.examples(point.request, self.encoder))
            yield from self._prompt_tokens[other]

    def _count(self, examples: Iterable[Example]) -> list[int]:
        return [len(self.encoder.encode(example).token_ids) for example in examples]


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
        ConfigError: the folder belongs to another model, its rows ran elsewhere, or another process fills this part.
    """
    with directory.claimed():
        worker = SweepWorker(config, loaded, directory, build_cache, allow_mixed=allow_mixed)
        return run_part(worker, limit=limit, part=part, say=say)


def run_part(
    worker: SweepWorker, *, limit: int | None, part: tuple[int, int], say: Callable[[str], None]
) -> RunOutcome:
    """Run one part of every cell's examples, in order, and say how far it is; see `run_sweep`."""
    outcome = RunOutcome()
    for warning in worker.warnings():
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
