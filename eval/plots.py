"""`report.png`: score and NLL over the bytes a cache really held, a line of panels for each task point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from .extras import require
from .figures import PANELS, draw_curves, legend_of, styles_of
from .report_tables import refusal_of, tables
from .summary import CellSummary

__all__ = ["save_plots"]

_MANY_CURVES = 14
_TITLE_LETTERS = 60


def save_plots(summaries: Sequence[CellSummary], path: Path) -> None:
    """Write one PNG; a task point whose context is worth too little has a sentence in place of curves.

    Raises:
        ConfigError: matplotlib is missing.
    """
    require("matplotlib", "The plot of a report")
    # The figure class is used directly: pyplot would pick a window system and keep figures alive.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    groups, styles = tables(summaries), styles_of(summaries)
    figure = Figure(figsize=(6 * len(PANELS) + 3, 4 * len(groups)), layout="constrained")
    axes = figure.subplots(len(groups), len(PANELS), squeeze=False)
    for line, (title, group) in zip(axes, groups, strict=True):
        refusal = refusal_of(group)
        for panel, (name, read) in zip(line, PANELS, strict=True):
            panel.set_title(fill(title, _TITLE_LETTERS), parse_math=False, fontsize="medium")
            if refusal is not None:
                panel.axis("off")
                panel.text(0.5, 0.5, fill(refusal, _TITLE_LETTERS), ha="center", va="center")
                continue
            panel.set_ylabel(name)
            draw_curves(panel, group, read, styles)
        if refusal is None:
            line[0].set_ylim(-0.05, 1.05)
            _add_legend(line[-1], legend_of(group))
    FigureCanvasAgg(figure).print_png(str(path))


def _add_legend(panel: Any, names: Mapping[str, str]) -> None:
    """Beside the panels, where no number of curves can cover them."""
    handles, labels = panel.get_legend_handles_labels()
    legend = panel.legend(
        handles,
        [names[label] for label in labels],
        loc="upper left",
        bbox_to_anchor=(1.02, 1.0),
        fontsize="small" if len(labels) <= _MANY_CURVES else "x-small",
        frameon=False,
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
