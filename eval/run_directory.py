"""A run on disk: who ran what where, one folder a cell, and one file of samples a worker.

    run.json                          the sweep, the model's identity, what texts came from
    environments/KEY.json             where rows ran: versions, hardware, threads
    canaries/KEY.json                 what the full cache answered there before the first row
    examples/TASK-LENGTH-SEED.jsonl   what was asked
    cells/LABEL--KEY/cell.json        what was requested of a cell
    cells/LABEL--KEY/samples.R.jsonl  rows of worker R, appended as they are known
    workers/R.lock                    held by the process that is worker R, for as long as it lives

Workers share no file that they append to, so that any number of them may work and die at once: what an interrupt leaves
is at most one torn last line of each, which its next start cuts off. `run.json` and the cells are written by the worker
that leads, before the others begin. Examples and environments are the same whoever writes them.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError, IntegrityError
from .cells import Cell
from .outcomes import DONE
from .records import SCHEMA_VERSION, Row

__all__ = ["RunDirectory", "write_atomically"]


class RunDirectory:
    """The folder of one run, as worker `rank` sees it. Opening it for another model or prompt format is refused.

    A worker that `follows` finds everything but its samples written by another one, which began before it.
    """

    def __init__(self, path: Path, *, rank: int = 0, follows: bool = False) -> None:
        self.path, self.rank, self.follows = path, rank, follows
        self._folders: dict[str, Path] = {}

    @contextmanager
    def claimed(self) -> Iterator[None]:
        """Be the only process that is this worker: two would write rows of the same examples, and cut off each other's.

        The system gives a dead process's claim up. Where a file system knows no locks, nothing is checked.

        Raises:
            ConfigError: another process is this worker.
        """
        if self.follows and not self.path.is_dir():
            yield  # not the leader's folder: `begin` says so
            return
        lock = self.path / "workers" / f"{self.rank}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with lock.open("a") as stream:
            if not _is_ours(stream.fileno()):
                raise ConfigError(
                    f"Another process is filling part {self.rank + 1} of {self.path}; two would run the same examples. "
                    "Wait for it, or give every process a --part I/N of its own, of one N."
                )
            yield

    @property
    def run_path(self) -> Path:
        """Configuration and digests of the run."""
        return self.path / "run.json"

    def begin(self, run: Mapping[str, Any]) -> None:
        """Create the folder and `run.json`, or check that an existing one belongs to the same experiment.

        Tasks of earlier calls stay in the record.

        Raises:
            ConfigError: the folder holds results under another identity, or of a task with other texts.
        """
        if self.run_path.is_file():
            before = self.read_run()
            if before.get("identity_sha256") != run["identity_sha256"]:
                raise ConfigError(
                    f"{self.path} holds a run with another model, tokenizer or prompt format; its rows "
                    "cannot be continued. Give another folder with --out."
                )
            run = {**run, "tasks": self._joined(before.get("tasks", {}), run.get("tasks", {}))}
        elif self.follows:
            raise ConfigError(
                f"{self.path} holds no run.json for worker {self.rank}. All workers must see one shared folder: give "
                "one with --out that every machine has under this name."
            )
        if not self.follows:
            self.path.mkdir(parents=True, exist_ok=True)
            write_atomically(self.run_path, json.dumps(run, indent=1, sort_keys=True) + "\n")
        for samples in self._samples(f"samples.{self.rank}.jsonl"):
            _cut_torn_line(samples)

    def _joined(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """All tasks of the folder. Cells do not name a task's parameters, so those must not have changed."""
        changed = [name for name in now if name in before and dict(before[name]) != dict(now[name])]
        if changed:
            was, name = before[changed[0]], changed[0]
            keys = [key for key in {**was, **now[name]} if was.get(key) != now[name].get(key)]
            raise ConfigError(
                f"{self.path} holds rows of task {name!r} with another {', '.join(keys)}; they cannot be put "
                "together. Give another folder with --out."
            )
        return {**before, **now}

    def read_run(self) -> dict[str, Any]:
        """The parsed `run.json`, with every environment by its key, and the canaries where there are any.

        Raises:
            ConfigError: the folder holds no run.
            IntegrityError: a file of it is damaged.
        """
        if not self.run_path.is_file():
            raise ConfigError(f"{self.path} holds no run.json. Give the folder that `kvpolicy eval run` wrote.")
        run = _read_json(self.run_path, required=("identity_sha256", "tasks"))
        canaries = self._by_key("canaries")
        return {**run, "environments": self.environments(), **({"canaries": canaries} if canaries else {})}

    def sweep(self) -> dict[str, Any] | None:
        """The sweep that the folder was begun, or last continued, with; None in a folder without a run."""
        return self.read_run().get("sweep", {}) if self.run_path.is_file() else None

    def environments(self) -> dict[str, Any]:
        """Where rows of this run ran, by key."""
        return self._by_key("environments")

    def add_environment(self, key: str, environment: Mapping[str, Any]) -> None:
        """Note where this worker runs, if no other has: the key is a digest of what it says."""
        self._add("environments", key, environment)

    def canary(self, environment: str) -> dict[str, Any] | None:
        """What the canary of an environment found, if one was run there."""
        return self._by_key("canaries").get(environment)

    def add_canary(self, environment: str, canary: Mapping[str, Any]) -> None:
        """Keep what the canary of an environment found."""
        self._add("canaries", environment, canary)

    def _by_key(self, folder: str) -> dict[str, Any]:
        files = sorted((self.path / folder).glob("*.json"))
        return {file.stem: _read_json(file) for file in files}

    def _add(self, folder: str, key: str, content: Mapping[str, Any]) -> None:
        path = self.path / folder / f"{key}.json"
        path.parent.mkdir(exist_ok=True)
        if not path.is_file():
            write_atomically(path, json.dumps(content, indent=1, sort_keys=True) + "\n")

    def save_examples(self, name: str, lines: str) -> None:
        """Keep the examples of a task point, which rows refer to by id; those of earlier calls stay."""
        path = self.path / "examples" / f"{name}.jsonl"
        path.parent.mkdir(exist_ok=True)
        before = path.read_text(encoding="utf-8").split("\n") if path.is_file() else []
        kept = "\n".join(filter(None, dict.fromkeys([*before, *lines.split("\n")]))) + "\n"
        if kept.split("\n") != before:
            write_atomically(path, kept)

    def open_cell(self, cell: Cell, cell_key: str, order: int) -> None:
        """Make the folder of a cell; `order` is its place in the sweep."""
        folder = self.path / "cells" / f"{_readable(cell)}--{cell_key}"
        self._folders[cell_key] = folder
        if self.follows:
            return
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "cell_key": cell_key,
            "coordinates": cell.coordinates(),
            "order": order,
            "schema_version": SCHEMA_VERSION,
        }
        text = json.dumps(content, indent=1, sort_keys=True) + "\n"
        if not (folder / "cell.json").is_file() or (folder / "cell.json").read_text(encoding="utf-8") != text:
            write_atomically(folder / "cell.json", text)

    def append(self, row: Row) -> None:
        """Write one row of an opened cell so that it survives an interrupt right after."""
        samples = self._folders[row.cell_key] / f"samples.{self.rank}.jsonl"
        with samples.open("a", encoding="utf-8") as stream:
            stream.write(row.to_json() + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def rows(self) -> list[Row]:
        """All rows of all workers, one a key: a good one before a failed one, then the newest; torn lines left out.

        Raises:
            IntegrityError: a line, or the description of a cell, is damaged.
        """
        found: dict[str, Row] = {}
        orders: dict[str, int] = {}
        for samples in self._samples("samples.*.jsonl"):
            cell = _read_json(samples.parent / "cell.json", required=("coordinates", "cell_key", "order"))
            orders[cell["cell_key"]] = cell["order"]
            for row in _rows_of(samples, {"cell": cell["coordinates"], "cell_key": cell["cell_key"]}):
                before = found.get(row.row_key)
                if before is None or row.status in DONE or before.status not in DONE:
                    found[row.row_key] = row
        return sorted(found.values(), key=lambda row: (orders[row.cell_key], row.example["index"]))

    def cell_keys(self) -> frozenset[str]:
        """The keys of the cells that the folder holds."""
        return frozenset(folder.name.rpartition("--")[2] for folder in (self.path / "cells").glob("*--*"))

    def _samples(self, pattern: str) -> list[Path]:
        return sorted((self.path / "cells").glob(f"*/{pattern}"))


def write_atomically(path: Path, text: str) -> None:
    """Replace a file as a whole: a reader sees the old text or the new one, whenever the writer dies."""
    # Machines that share a folder may have processes of one id.
    staged = path.with_suffix(f"{path.suffix}.{uuid.uuid4().hex}.part")
    staged.write_text(text, encoding="utf-8")
    staged.replace(path)


def _read_json(path: Path, *, required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The mapping of a file that is written as a whole.

    Raises:
        IntegrityError: it is not there, is not JSON, or lacks a key.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        missing = [key for key in required if key not in found] if isinstance(found, dict) else ["a mapping"]
        reason = f"it holds no {missing[0]}" if missing else ""
    except (OSError, ValueError) as error:
        found, reason = {}, str(error)
    if reason:
        raise IntegrityError(
            f"{path} is damaged: {reason}. Restore the file, or run the sweep again into another folder."
        )
    return dict(found)


def _rows_of(samples: Path, shared: Mapping[str, Any]) -> Iterator[Row]:
    # By bytes: an answer may hold characters that Python takes for line ends, and a torn line may end inside one.
    lines = samples.read_bytes().split(b"\n")[:-1]
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            values = json.loads(line)
            if not isinstance(values, dict):
                raise IntegrityError(f"It holds no record but {type(values).__name__}.")
            yield Row.from_mapping({**values, **shared})
        except (ValueError, IntegrityError) as error:
            raise IntegrityError(
                f"{samples}, line {number} cannot be read. {error} Delete the line to have its example run again."
            ) from error


def _is_ours(descriptor: int) -> bool:
    """Whether no other process holds the lock of this open file; it is held until the file is closed."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def _readable(cell: Cell) -> str:
    return re.sub(r"[^A-Za-z0-9.=_-]+", "_", f"{cell.task}-{cell.length_tokens}-{cell.label}")[:100]


def _cut_torn_line(samples: Path) -> None:
    """Drop what an interrupted write left without a line end, so that the next row starts a line."""
    content = samples.read_bytes()
    whole_bytes = content.rfind(b"\n") + 1
    if whole_bytes < len(content):
        with samples.open("r+b") as stream:
            stream.truncate(whole_bytes)
