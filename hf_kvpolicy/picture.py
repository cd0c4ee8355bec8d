"""The picture of a trace: kept positions over time, and how many rows each layer and head was given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .errors import ConfigError
from .trace import Trace, TraceRow, blocks

__all__ = ["save_picture"]

_COLOURS = {"not fed yet": "#ffffff", "dropped": "#dde3e8", "kept": "#1f6f9f"}
_PROMPT_COLOUR = "#d1495b"


def save_picture(run: Trace, path: Path, title: str) -> None:
    """Draw a trace as a PNG: a line a step, a column a token position, one panel per KV head, then every layer's and
    head's rows. Needs matplotlib.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    panels, steps, total = blocks(run), len(run.heads[0]), run.heads[0][-1].tokens
    width = min(14.0, max(7.0, 2.0 + total * 0.2))
    height = min(9.0, max(1.6, 0.8 + steps * 0.2))
    owners_height = 0.9 + 0.24 * len(run.owner_rows)
    ratios = [height] * len(panels) + [owners_height]
    figure = Figure(figsize=(width, sum(ratios) + 0.9), layout="constrained")
    colours = ListedColormap(list(_COLOURS.values()))
    axes = figure.subplots(len(ratios), 1, squeeze=False, gridspec_kw={"height_ratios": ratios})[:, 0]
    for panel, (name, rows) in zip(axes, panels, strict=False):
        panel.pcolormesh(
            _edges(total), _edges(steps), _cells(rows, total), cmap=colours, vmin=0, vmax=2,
            edgecolor="white", linewidth=0.8 if total <= 100 and steps <= 100 else 0.0,
        )  # fmt: skip
        _label(panel, name, rows, total)
    _owners(axes[-1], run.owner_rows)
    legend = [Patch(facecolor=colour, edgecolor="#adb5bd", label=label) for label, colour in _COLOURS.items()][1:]
    figure.legend(handles=legend, loc="outside upper right", ncols=2, frameon=False, fontsize=9)
    figure.suptitle(title, x=0.01, ha="left", fontsize=12)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            FigureCanvasAgg(figure).print_png(file)
    except OSError as error:
        raise ConfigError(f"The picture {str(path)!r} cannot be written: {error}.") from error


def _edges(count: int) -> list[float]:
    """Cell edges such that each cell's middle is its number."""
    return [i - 0.5 for i in range(count + 1)]


def _cells(rows: Sequence[TraceRow], total: int) -> list[list[int]]:
    """Colour numbers, [steps, positions]."""
    cells = [[1] * row.tokens + [0] * (total - row.tokens) for row in rows]
    for line, row in zip(cells, rows, strict=True):
        for position in row.positions:
            line[position] = 2
    return cells


def _label(panel: Any, name: str, rows: Sequence[TraceRow], total: int) -> None:
    """Title, axes, the prompt's end, and how many rows each step leaves (every few steps where there are many)."""
    prompt, every = rows[0].tokens, -(-len(rows) // 24)
    ticks = range(0, len(rows), every)
    panel.set_title(name, loc="left", fontsize=10)
    panel.set(xlim=(-0.5, total - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel="token position", ylabel="tokens fed")
    panel.set_yticks(list(ticks), [str(rows[i].tokens) for i in ticks], fontsize=8)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
    for i in ticks:
        panel.annotate(
            f"{len(rows[i].positions)} rows", (1.0, i), xycoords=("axes fraction", "data"), xytext=(5, 0),
            textcoords="offset points", va="center", fontsize=8, color="#495057",
        )  # fmt: skip
    if prompt < total:
        panel.axvline(prompt - 0.5, color=_PROMPT_COLOUR, linewidth=1.4)
        panel.annotate(
            "end of prompt", (prompt - 0.5, 1.0), xycoords=("data", "axes fraction"), xytext=(0, 3),
            textcoords="offset points", ha="center", fontsize=8, color=_PROMPT_COLOUR,
        )  # fmt: skip


def _owners(panel: Any, owner_rows: Sequence[Sequence[int]]) -> None:
    """A cell for every layer and head, with its rows after the prompt."""
    most = max(max(layer) for layer in owner_rows)
    panel.set_title("rows of every layer and head after the prompt", loc="left", fontsize=10)
    panel.pcolormesh(
        _edges(len(owner_rows[0])), _edges(len(owner_rows)), owner_rows, cmap="Blues", vmin=0, vmax=max(1, 2 * most),
        edgecolor="white", linewidth=1.0,
    )  # fmt: skip
    for layer, heads in enumerate(owner_rows):
        for head, rows in enumerate(heads):
            panel.text(head, layer, str(rows), ha="center", va="center", fontsize=8)
    panel.set(xlabel="KV head", ylabel="layer", ylim=(len(owner_rows) - 0.5, -0.5))
    panel.set_xticks(range(len(owner_rows[0])))
    panel.set_yticks(range(len(owner_rows)))
    panel.tick_params(length=0, labelsize=8)
    panel.spines[:].set_visible(False)
