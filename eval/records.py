"""What a run leaves on disk: one JSON line an example, appended as it is known, and `run.json`."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, IntegrityError

__all__ = ["SCHEMA_VERSION", "CacheRecord", "QualityRecord", "Row", "RunDirectory", "TimingRecord"]

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRecord:
    """What the model said. `answer_nll` is nats per gold token, fed one token at a time."""

    score: float
    answer_nll: float
    answer_top1_rate: float
    answer_tokens: int
    output_text: str
    output_tokens: int
    finish_reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecord:
    """What the cache really held: after the prompt, and `final_*` after the answer was generated.

    Rows are per layer and stored head. `full_kv_bytes` is the K/V payload of the same prompt in a full cache.
    """

    prompt_rows_mean: float
    prompt_rows_min: int
    prompt_rows_max: int
    final_rows_mean: float
    final_rows_max: int
    kept_ratio: float
    measured_bytes: int
    payload_bytes: int
    slack_bytes: int
    transient_peak_bytes: int
    full_kv_bytes: int
    budget_rows: int | None
    budget_binds: bool
    selections: int
    rows_dropped: int
    forwards: int
    publications: int
    manifest_sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRecord:
    """Wall-clock of the prefill and of one decode step; on a shared machine an indication only."""

    prefill_s: float
    decode_ms_per_token: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One example under one cell. A failed row has a reason and no quality."""

    row_key: str
    cell_key: str
    cell: Mapping[str, Any]
    example: Mapping[str, Any]
    status: str
    versions: Mapping[str, str]
    outcome: str | None = None
    reason: str | None = None
    quality: QualityRecord | None = None
    cache: CacheRecord | None = None
    timing: TimingRecord | None = None
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One line of `rows.jsonl`, without the line end."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Row:
        """Rebuild a row from a parsed line.

        Raises:
            IntegrityError: the line was written by another schema version.
        """
        if values.get("schema_version") != SCHEMA_VERSION:
            raise IntegrityError(
                f"A record has schema version {values.get('schema_version')}; this library reads "
                f"{SCHEMA_VERSION}. Run the sweep again into a new folder."
            )
        parts = {"quality": QualityRecord, "cache": CacheRecord, "timing": TimingRecord}
        nested = {name: part(**values[name]) for name, part in parts.items() if values[name] is not None}
        return cls(**{**values, **nested})


class RunDirectory:
    """The folder of one run. Opening it for a different model or prompt format is refused."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def rows_path(self) -> Path:
        """The JSON lines."""
        return self.path / "rows.jsonl"

    @property
    def run_path(self) -> Path:
        """Configuration, digests and versions of the run."""
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
        self.path.mkdir(parents=True, exist_ok=True)
        staged = self.run_path.with_suffix(".json.part")
        staged.write_text(json.dumps(run, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        staged.replace(self.run_path)
        self._cut_torn_line()

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
        """The parsed `run.json`.

        Raises:
            ConfigError: the folder holds no run.
        """
        if not self.run_path.is_file():
            raise ConfigError(f"{self.path} holds no run.json. Give the folder that `kvpolicy eval run` wrote.")
        run: dict[str, Any] = json.loads(self.run_path.read_text(encoding="utf-8"))
        return run

    def append(self, row: Row) -> None:
        """Write one row so that it survives an interrupt right after."""
        with self.rows_path.open("a", encoding="utf-8") as stream:
            stream.write(row.to_json() + "\n")
            stream.flush()
            os.fsync(stream.fileno())

    def rows(self) -> list[Row]:
        """All rows, the last one of each key; an unfinished last line is left out."""
        if not self.rows_path.is_file():
            return []
        complete = self.rows_path.read_text(encoding="utf-8").rpartition("\n")[0]
        found = [Row.from_mapping(json.loads(line)) for line in complete.splitlines() if line]
        return list({row.row_key: row for row in found}.values())

    def _cut_torn_line(self) -> None:
        """Drop what an interrupted write left without a line end, so that the next row starts a line."""
        if self.rows_path.is_file():
            content = self.rows_path.read_bytes()
            whole_bytes = content.rfind(b"\n") + 1
            # Otherwise the file is left alone: another part of the run may be adding to it.
            if whole_bytes < len(content):
                with self.rows_path.open("r+b") as stream:
                    stream.truncate(whole_bytes)
