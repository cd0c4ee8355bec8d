"""What a bench prints: a number, the target it is read against, and what it was taken from."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from rich.console import Console
from rich.table import Table

Bound = Literal["<=", "<", ">=", "=="]


@dataclass(frozen=True)
class Measure:
    """One value, mostly a ratio, with its target; `details` holds the raw values it was computed from."""

    group: str
    name: str
    # None for what could not be measured; `details` tell why.
    value: float | None
    bound: Bound
    # None for a value that is only printed.
    target: float | None
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def met(self) -> bool:
        """Whether the value keeps its target, unrounded."""
        value, target = self.value, self.target
        if target is None or value is None:
            return target is None
        return {"<=": value <= target, "<": value < target, ">=": value >= target, "==": value == target}[self.bound]

    @property
    def shown(self) -> str:
        """The value as a table shows it."""
        return "-" if self.value is None else f"{self.value:.3f}"


def environment(model: str, device: str, dtype: str) -> dict[str, Any]:
    on_cuda = device.startswith("cuda")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "model": Path(model).name,
        "device": torch.cuda.get_device_name(device) if on_cuda else platform.machine(),
        "dtype": dtype,
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _detail_text(details: dict[str, Any]) -> str:
    return ", ".join(f"{k} {_short(v)}" for k, v in details.items() if not isinstance(v, (list, dict)))


def _short(value: float | int | str) -> str:
    if isinstance(value, int) and abs(value) >= 2**30:
        return f"{value / 2**30:.2f} GiB"
    if isinstance(value, int) and abs(value) >= 2**10:  # only bytes are as large as this
        return f"{value / 2**20:.2f} MiB" if abs(value) >= 2**20 else f"{value / 2**10:.1f} KiB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def result_table(measures: list[Measure]) -> Table:
    table = Table(title="Values and their targets", title_justify="left")
    for heading in ("measure", "case"):
        table.add_column(heading, no_wrap=True)
    for heading in ("value", "target"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("met")
    table.add_column("from")
    for position, m in enumerate(measures):
        last = position + 1 == len(measures) or measures[position + 1].group != m.group
        met = "" if m.target is None else "[green]yes[/]" if m.met else "[red]no[/]"
        table.add_row(
            m.group,
            m.name,
            m.shown,
            "-" if m.target is None else f"{m.bound} {m.target:g}",
            met,
            _detail_text(m.details),
            end_section=last,
        )
    return table


def write_json(path: Path, facts: dict[str, Any], measures: list[Measure]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{**asdict(measure), "met": measure.met} for measure in measures]
    path.write_text(json.dumps({"environment": facts, "measures": rows}, indent=1) + "\n", encoding="utf-8")


def print_report(facts: dict[str, Any], measures: list[Measure]) -> None:
    console = Console()
    wide = Console(width=max(console.width, 150))
    wide.print(", ".join(f"{k} {v}" for k, v in facts.items() if v), highlight=False)
    wide.print(result_table(measures))
    missed = [m for m in measures if not m.met]
    targets = [m for m in measures if m.target is not None]
    if targets:
        wide.print(f"{len(targets) - len(missed)} of {len(targets)} targets met", highlight=False)
