"""Score and NLL over the bytes a cache really held, one curve a policy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .extras import require
from .report import tables
from .statistics import SMOKE_BELOW, Interval
from .summary import CellSummary, Measured

__all__ = ["save_plots"]

_PANELS: tuple[tuple[str, Callable[[Measured], Interval]], ...] = (
    ("score", lambda measured: measured.score),
    ("answer NLL, nats per token", lambda measured: measured.answer_nll),
)


def save_plots(summaries: list[CellSummary], path: Path) -> None:
    """Write one PNG: a line of panels for each task and length.

    Raises:
        ConfigError: matplotlib is missing.
    """
    require("matplotlib", "The plot of a report")
    # The figure class is used directly: pyplot would pick a window system and keep figures alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups = tables(summaries)
    figure = Figure(figsize=(6 * len(_PANELS), 4 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), len(_PANELS), squeeze=False)
    for line, (title, group) in zip(axes, groups, strict=True):
        for panel, (name, read) in zip(line, _PANELS, strict=True):
            _draw(panel, group, read)
            panel.set(title=title, xlabel="measured cache bytes after the prompt, slack included, MiB", ylabel=name)
        line[0].set_ylim(-0.05, 1.05)
        line[0].legend(fontsize="small")
    FigureCanvasAgg(figure).print_png(str(path))


def _draw(panel: Any, group: list[CellSummary], read: Callable[[Measured], Interval]) -> None:
    """Curves with error bars; the full cache has one size: a point, and a dashed level to compare with."""
    for name, points in _curves(group).items():
        measured = sorted(points, key=lambda point: point.measured_bytes)
        intervals = [read(point) for point in measured]
        label = f"{name} ({_counts(measured)})"
        style: dict[str, Any] = {"marker": "o"}
        if name == "full":
            panel.axhline(intervals[0].mean, linestyle="--", linewidth=1, color="black", zorder=1)
            style = {"marker": "s", "color": "black", "linestyle": "none"}
        below = [interval.mean - interval.low for interval in intervals]
        above = [interval.high - interval.mean for interval in intervals]
        panel.errorbar(
            [point.measured_bytes / 2**20 for point in measured],
            [interval.mean for interval in intervals],
            yerr=[below, above],
            capsize=3,
            label=label,
            **style,
        )
    panel.set_xlim(left=0)


def _curves(group: list[CellSummary]) -> dict[str, list[Measured]]:
    """Points of each policy and option set, budgets along the curve; failed cells have none."""
    curves: dict[str, list[Measured]] = defaultdict(list)
    for summary in group:
        if summary.measured is not None:
            curves[summary.cell.label.partition(" @ ")[0]].append(summary.measured)
    return curves


def _counts(measured: list[Measured]) -> str:
    counts = sorted({point.n for point in measured})
    span = f"n={counts[0]}" if len(counts) == 1 else f"n={counts[0]}-{counts[-1]}"
    return f"{span}, smoke" if counts[0] < SMOKE_BELOW else span
