"""A sweep on a Ray cluster: every worker loads the model once and is handed one example after another.

A worker writes its rows into the run's folder itself, so the folder must be one that all machines share. The driver
loads no model and merges nothing: it hands out examples, gives those of a dead worker to another, and says how far the
run is.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..errors import ConfigError, KVPolicyError
from . import cells
from .engine import EngineBuilder
from .execution import Execution
from .extras import require
from .feasible import check_lengths
from .model_loading import load_for_command
from .progress import Progress
from .run_directory import RunDirectory
from .runner import RunOutcome, SweepWorker
from .sweep import SweepConfig, parse_sweep

__all__ = ["RayWorker", "Report", "run_on_ray"]

# An example that ends this many workers is left out: it may be what ends them, by its memory.
_WORKERS_PER_EXAMPLE = 2
_SECONDS_TO_END = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One example; `lost_workers` died at it."""

    point: int
    number: int
    lost_workers: int = 0


@dataclass(slots=True, kw_only=True)
class Report:
    """What became of one example: rows counted, and for people each cell's score or failure. A `Listener`."""

    outcome: RunOutcome = field(default_factory=RunOutcome)
    scores: list[tuple[str, float]] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def scored(self, label: str, score: float) -> None:
        """A cell answered."""
        self.scores.append((label, score))

    def failed(self, label: str, reason: str) -> None:
        """A cell failed, and is not run again by this worker."""
        self.failures.append((label, reason))

    def noted(self, note: str) -> None:
        """Something is to be known of the task point."""
        self.notes.append(note)


class RayWorker:
    """What runs in a Ray actor: a model, and the sweep as this worker sees it."""

    def __init__(self, document: Mapping[str, Any], out: str, rank: int) -> None:
        """Args: the sweep's mapping, the shared folder, and this worker's number in it."""
        self._config, self._out, self._rank = parse_sweep(document), Path(out), rank
        # Given up when the actor ends.
        self._claim = ExitStack()

    def load(self) -> None:
        """Load the model. Raises ConfigError where this machine has none of that name, or it has too few positions."""
        model = self._config.model
        self._loaded = load_for_command(model.name, model.dtype, model.device)
        check_lengths(self._config, self._loaded.model.config)

    def begin(self, follows: bool, allow_mixed: bool) -> list[str]:
        """Begin or continue the folder, and return what is to be warned of. Raises ConfigError where it is refused."""
        directory = RunDirectory(self._out, rank=self._rank, follows=follows)
        build = EngineBuilder(self._loaded.model, self._loaded.tokenizer)
        self._claim.enter_context(directory.claimed())
        self._worker = SweepWorker(self._config, self._loaded, directory, build, allow_mixed=allow_mixed)
        return self._worker.warnings()

    def run(self, point: int, number: int, read_again: bool) -> Report:
        """Run one example; `read_again` where another worker may have written some of its rows."""
        if read_again:
            self._worker.find_done()
        report = Report()
        report.outcome = self._worker.run(point, number, report)
        return report


def run_on_ray(config: SweepConfig, out: Path, how: Execution, *, say: Callable[[str], None]) -> RunOutcome:
    """Run what is not done yet of a sweep on the workers of a Ray cluster; see `run_sweep`.

    Joins the cluster that this process belongs to or that RAY_ADDRESS names, and else starts one on this machine.

    Raises:
        ConfigError: Ray is not installed, the cluster has no room, or a worker refuses the model or the folder.
        KVPolicyError: no worker is left.
    """
    # Ray reports its use over the network; a run of this harness reaches out to nothing.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray: Any = require("ray", "The engine ray", extra="ray")
    started = not ray.is_initialized()
    if started:
        ray.init(log_to_driver=False)
    crew: _Crew | None = None
    try:
        crew = _Crew(ray, config, out.resolve(), how)
        return crew.run(say)
    finally:
        # Also after an interrupt: rows are on disk, and what a worker is at is lost.
        if crew is not None:
            crew.dismiss()
        if started:
            ray.shutdown()


class _Crew:
    """The driver's side: who is idle, who is at which example."""

    def __init__(self, ray: Any, config: SweepConfig, out: Path, how: Execution) -> None:
        self._ray, self._config, self._how = ray, config, how
        self._points = list(cells.task_points(config))
        needs = {"num_cpus": config.threads, "num_gpus": int(config.model.device.startswith("cuda"))}
        count = _worker_count(ray.cluster_resources(), needs, how.workers)
        actor = ray.remote(**needs)(RayWorker)
        self._running: dict[Any, tuple[Any, _Job]] = {}
        self.workers: list[Any] = [actor.remote(config.document, str(out), rank) for rank in range(count)]

    def run(self, say: Callable[[str], None]) -> RunOutcome:
        for warning in self._begin():
            say(f"warning: {warning}")
        todo = deque(self._jobs())
        outcome, progress = RunOutcome(), Progress(say, [len(todo)])
        progress.begin(0, f"{len(self.workers)} workers")
        idle, running = deque(self.workers), self._running
        while todo or running:
            while todo and idle:
                worker, job = idle.popleft(), todo.popleft()
                running[worker.run.remote(job.point, job.number, job.lost_workers > 0)] = worker, job
            if not running:
                raise KVPolicyError("No worker is left. The same command with the same --out continues the run.")
            (done,), _ = self._ray.wait(list(running))
            worker, job = running.pop(done)
            try:
                report = self._result(done)
            except self._ray.exceptions.RayActorError as error:
                say(f"a worker died: {str(error).strip().splitlines()[0]}")
                if job.lost_workers + 1 < _WORKERS_PER_EXAMPLE:
                    todo.appendleft(_Job(point=job.point, number=job.number, lost_workers=job.lost_workers + 1))
                else:
                    say(f"{self._points[job.point].title}: example {job.number + 1} is left out; workers die at it")
                    outcome.failed += 1
                continue
            idle.append(worker)
            outcome.add(report.outcome)
            _tell(progress, self._points[job.point].title, report)
        progress.end()
        return outcome

    def dismiss(self) -> None:
        """End all workers. What one is at ends with it, so that nobody writes into the folder any more."""
        for worker in self.workers:
            self._ray.kill(worker)
        if self._running:
            self._ray.wait(list(self._running), num_returns=len(self._running), timeout=_SECONDS_TO_END)

    def _begin(self) -> list[str]:
        """All load at once; the first begins the folder before the others look at it, and what warns it is returned."""
        for loading in [worker.load.remote() for worker in self.workers]:
            self._result(loading)
        first, others = self.workers[0], self.workers[1:]
        warnings: list[str] = self._result(first.begin.remote(False, self._how.allow_mixed))
        for beginning in [worker.begin.remote(True, self._how.allow_mixed) for worker in others]:
            self._result(beginning)
        return warnings

    def _jobs(self) -> Iterator[_Job]:
        for index, point in enumerate(self._points):
            for number in range(point.request.num_examples)[: self._how.limit]:
                yield _Job(point=index, number=number)

    def _result(self, reference: Any) -> Any:
        """What a worker returned; what it refused is raised as it would be here."""
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None


def _worker_count(resources: Mapping[str, float], needs: Mapping[str, int], asked: int | None) -> int:
    """As many workers as are asked for, or as the cluster has room for.

    Raises:
        ConfigError: it has less room; Ray would wait for more for ever.
    """
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    room = min(int(resources.get(names[need], 0)) // count for need, count in needs.items() if count)
    if room >= max(1, asked or 1):
        return asked or room
    each = ", ".join(f"{count} {names[need]}" for need, count in needs.items() if count)
    raise ConfigError(
        f"{asked or 1} workers of {each} each are asked for; this Ray cluster has room for {room}. Ask for fewer with "
        "--workers, lower `threads` in the sweep, or add machines."
    )


def _tell(progress: Progress, title: str, report: Report) -> None:
    for note in report.notes:
        progress.noted(note)
    for label, reason in report.failures:
        progress.failed(f"{title}, {label}", reason)
    for label, score in report.scores:
        progress.scored(f"{title}, {label}", score)
    progress.example_done()
