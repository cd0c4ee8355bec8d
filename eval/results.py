"""Results to compare and report: one a cell, with its coordinates, its summary and the rows that both are made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from .coordinates import coordinates_of
from .outcomes import DEFAULT_DELTA
from .packed import PackedRun
from .records import Row
from .run_directory import RunDirectory
from .summary import CellSummary, by_cell, summarise

__all__ = ["Result", "RunSource", "delta_of", "open_run", "results_of", "summaries_of"]


class RunSource(Protocol):
    """Where a run is read from: its folder (`RunDirectory`), or one file (`PackedRun`)."""

    @property
    def path(self) -> Path:
        """The folder or file."""
        ...

    def read_run(self) -> dict[str, Any]:
        """Configuration, digests and versions."""
        ...

    def rows(self) -> list[Row]:
        """One row an example."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One cell of one run, seeds pooled. `source` names the run for people."""

    source: str
    rows: tuple[Row, ...]
    coordinates: Mapping[str, Any]
    summary: CellSummary

    @property
    def label(self) -> str:
        """Policy, options and budget for people."""
        return self.summary.cell.label

    @property
    def cell_keys(self) -> frozenset[str]:
        """The keys of its cells, one a seed."""
        return frozenset(row.cell_key for row in self.rows)


def open_run(path: Path) -> RunSource:
    """The folder that `kvpolicy eval run` wrote, or the file that `kvpolicy eval pack` wrote, to be read.

    Raises:
        ConfigError: there is neither.
    """
    if not path.exists():
        raise ConfigError(
            f"There is no folder {str(path)!r}. Give the folder that `kvpolicy eval run` wrote, or a file that "
            "`kvpolicy eval pack` wrote."
        )
    return RunDirectory(path) if path.is_dir() else PackedRun(path)


def results_of(source: RunSource) -> list[Result]:
    """Every cell of a run, in the order in which they were run.

    Raises:
        ConfigError: there are no rows.
    """
    run, rows = source.read_run(), source.rows()
    if not rows:
        raise ConfigError(f"{source.path} holds no rows yet. Run `kvpolicy eval run` with --out there first.")
    summaries = summarise(rows, delta=delta_of(run))
    return [
        Result(source=str(source.path), rows=tuple(group), coordinates=coordinates_of(group, run), summary=summary)
        for group, summary in zip(by_cell(rows).values(), summaries, strict=True)
    ]


def summaries_of(source: RunSource) -> list[CellSummary]:
    """The summaries of `results_of`.

    Raises:
        ConfigError: there are no rows.
    """
    return [result.summary for result in results_of(source)]


def delta_of(run: Mapping[str, Any]) -> float:
    """The loss of score that this run holds to be none."""
    return float(run.get("delta", DEFAULT_DELTA))
