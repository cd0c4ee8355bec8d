"""The figures of a report: quality over bytes, the Pareto front, needle heat maps; and a figure as inline SVG.

Every curve has a colour and a marker of its own, so that neither colour vision nor a printer decides what can be read.
"""

from __future__ import annotations

import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .pareto import is_compared, on_front
from .statistics import SMOKE_BELOW, Interval
from .summary import CellSummary, Measured
from .sweep import NO_CONTEXT

__all__ = [
    "MAP_COLOURS",
    "PANELS",
    "Style",
    "curve_name",
    "draw_curves",
    "draw_front",
    "draw_heat_map",
    "legend_of",
    "page_panel",
    "styles_of",
    "svg_of",
]

PANELS: tuple[tuple[str, Callable[[Measured], Interval]], ...] = (
    ("score", lambda measured: measured.score),
    ("answer NLL, nats per token", lambda measured: measured.answer_nll),
)
_BYTES_PER_MIB = 2**20
_BYTES_LABEL = "measured cache bytes after the prompt, MiB"
# Okabe and Ito's colours without black, which is the full cache's, and yellow, which white paper swallows.
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
# Eleven and six have no common factor: 66 curves pass before a pair returns.
_MARKERS = ("o", "^", "v", "D", "P", "X", "<", ">", "p", "h", "*")
# Becomes the text's colour on the page; also a black that prints.
_INK = "#010203"
_GREY = "#8a8a8a"
_NUMBER_PLACES = ((0, 10), (0, -10), (10, 0), (-10, 0))
MAP_COLOURS = "cividis"
# With more lengths than this, numbers in the squares of a map would be too small to read.
_MAX_NUMBERED = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """How a policy with its options is drawn, the same in every figure of a report."""

    colour: str
    marker: str
    line: str

    def keywords(self) -> dict[str, Any]:
        """As matplotlib names them."""
        return {"color": self.colour, "marker": self.marker, "linestyle": self.line}


def curve_name(summary: CellSummary) -> str:
    """Policy and options: budgets lie along a curve."""
    return summary.cell.label.partition(" @ ")[0]


def styles_of(summaries: Iterable[CellSummary]) -> dict[str, Style]:
    """A style for every curve name, in the order in which they first appear."""
    names = list(dict.fromkeys(map(curve_name, summaries)))
    styles = {
        "full": Style(colour=_INK, marker="s", line="none"),
        NO_CONTEXT: Style(colour=_GREY, marker="", line=":"),
    }
    for index, name in enumerate(name for name in names if name not in styles):
        lines = ("-", "--", "-.")
        styles[name] = Style(
            colour=_COLOURS[index % len(_COLOURS)],
            marker=_MARKERS[index % len(_MARKERS)],
            line=lines[index // len(_COLOURS) % len(lines)],
        )
    return {name: styles[name] for name in names}


def legend_of(group: Iterable[CellSummary]) -> dict[str, str]:
    """By curve name: the name with the examples behind its points; a curve without a point has no entry."""
    counts: dict[str, set[int]] = defaultdict(set)
    for summary in group:
        if summary.measured is not None:
            counts[curve_name(summary)].add(summary.measured.n)
    labels = {}
    for name, found in counts.items():
        span = f"n={min(found)}" if len(found) == 1 else f"n={min(found)}-{max(found)}"
        labels[name] = f"{name} ({span}{', smoke' if min(found) < SMOKE_BELOW else ''})"
    return labels


def draw_curves(
    panel: Any,
    group: Iterable[CellSummary],
    read: Callable[[Measured], Interval],
    styles: Mapping[str, Style],
) -> None:
    """Curves with 95% intervals over bytes, one a policy and option set.

    The full cache is a point and a dashed level; no context is a dotted level, for it holds nothing of the text.
    """
    curves: dict[str, list[Measured]] = defaultdict(list)
    for summary in group:
        if summary.measured is not None:
            curves[curve_name(summary)].append(summary.measured)
    for name, points in curves.items():
        measured = sorted(points, key=lambda point: point.measured_bytes)
        intervals = [read(point) for point in measured]
        if name == NO_CONTEXT:
            panel.axhline(intervals[0].mean, linewidth=1.2, zorder=1, label=name, **styles[name].keywords())
            continue
        if name == "full":
            panel.axhline(intervals[0].mean, linestyle="--", linewidth=1, color=_INK, zorder=1)
        below = [interval.mean - interval.low for interval in intervals]
        above = [interval.high - interval.mean for interval in intervals]
        _, caps, bars = panel.errorbar(
            [point.measured_bytes / _BYTES_PER_MIB for point in measured],
            [interval.mean for interval in intervals],
            yerr=[below, above],
            capsize=2,
            linewidth=1.4,
            elinewidth=0.8,
            markersize=6,
            label=name,
            **styles[name].keywords(),
        )
        for part in (*caps, *bars):
            part.set_alpha(0.5)
    sizes = [point.measured_bytes for name, points in curves.items() if name != NO_CONTEXT for point in points]
    _bytes_axis(panel, sizes)


def draw_front(panel: Any, group: Sequence[CellSummary], styles: Mapping[str, Style], *, over_time: bool) -> None:
    """Score over bytes or decode time: cells on the Pareto front numbered as `on_front` orders them, others grey."""
    front = on_front(group)
    for summary in group:
        measured, style = summary.measured, styles[curve_name(summary)]
        if measured is None or not is_compared(summary):
            continue
        x = measured.decode_ms_per_token if over_time else measured.measured_bytes / _BYTES_PER_MIB
        is_front = summary in front
        look = {"color": style.colour, "zorder": 3} if is_front else {"color": _GREY, "alpha": 0.55, "zorder": 2}
        panel.plot([x], [measured.score.mean], marker=style.marker, linestyle="none", markersize=7, **look)
        if is_front:
            number = front.index(summary)
            panel.annotate(
                str(number + 1),
                (x, measured.score.mean),
                # Neighbours on the front often lie close together: their numbers go round the points.
                xytext=_NUMBER_PLACES[number % len(_NUMBER_PLACES)],
                textcoords="offset points",
                color=_INK,
                fontweight="bold",
                ha="center",
                va="center",
            )
    panel.set(ylim=(-0.09, 1.12), ylabel="score")
    if over_time:
        panel.set(xlabel="decode, ms per token")
        panel.set_xlim(left=0)
        panel.margins(x=0.1)
    else:
        _bytes_axis(panel, [s.measured.measured_bytes for s in group if s.measured is not None and is_compared(s)])


def draw_heat_map(
    panel: Any, cells: Mapping[tuple[float, int], float], depths: Sequence[float], lengths: Sequence[int]
) -> Any:
    """Mean scores, depth 0 at the top, on a scale that is 0 to 1 whatever they are; a square may have no examples.

    Args:
        panel: matplotlib axes.
        cells: mean scores by depth and length.
        depths: the lines, ascending.
        lengths: the columns, ascending, in tokens.
    """
    from matplotlib import colormaps
    from matplotlib.colors import Normalize

    values = [[cells.get((depth, length), math.nan) for length in lengths] for depth in depths]
    mesh = panel.pcolormesh(values, cmap=colormaps[MAP_COLOURS], norm=Normalize(0, 1), edgecolors=_GREY, linewidth=0.4)
    panel.invert_yaxis()
    panel.set_xticks([i + 0.5 for i in range(len(lengths))], [str(length) for length in lengths])
    panel.set_yticks([i + 0.5 for i in range(len(depths))], [f"{depth:g}" for depth in depths])
    panel.tick_params(length=0)
    if len(lengths) > _MAX_NUMBERED:
        panel.tick_params(axis="x", labelrotation=90)
        return mesh
    for line, depth in enumerate(depths):
        for column, length in enumerate(lengths):
            score = cells.get((depth, length))
            text, colour = ("-", _INK) if score is None else (f"{score:.2f}", "#000000" if score >= 0.5 else "#ffffff")
            panel.text(column + 0.5, line + 0.5, text, ha="center", va="center", color=colour, fontsize=9)
    return mesh


def page_panel(inches: tuple[float, float]) -> tuple[Any, Any]:
    """A figure with one panel whose paper and ink are those of the page it will stand in, light or dark."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = ("axes.edgecolor", "axes.labelcolor", "text.color", "xtick.color", "ytick.color")
    blank = {"figure.facecolor": "none", "axes.facecolor": "none"}
    with matplotlib.rc_context({**blank, **dict.fromkeys(inked, _INK)}):
        figure = Figure(figsize=inches, layout="constrained")
        panel = figure.subplots()
    # Ticks are made when they are drawn, long after the colours above are back to what they were.
    panel.tick_params(which="both", color=_INK, labelcolor=_INK)
    return figure, panel


def svg_of(figure: Any, prefix: str) -> str:
    """A figure as an `<svg>` element for a page of many: text is text, ink is the page's, ids begin with `prefix`.

    The same figure gives the same text at any time.
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    file = io.StringIO()
    plain = {"svg.fonttype": "none", "svg.hashsalt": prefix}
    with matplotlib.rc_context(plain):
        FigureCanvasSVG(figure).print_svg(file, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', lambda found: f"{found[1]}{prefix}-", text)
    return text.replace(_INK, "currentColor").strip()


def _bytes_axis(panel: Any, sizes_bytes: Sequence[float]) -> None:
    """Logarithmic to base 2, from power to power, with plain numbers; a size that is none leaves the axis alone."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    sizes = [size / _BYTES_PER_MIB for size in sizes_bytes if size > 0]
    if not sizes:
        return
    panel.set_xscale("log", base=2)
    low, high = (round_to(math.log2(size)) for round_to, size in ((math.floor, min(sizes)), (math.ceil, max(sizes))))
    panel.set_xlim(2.0**low * 0.94, 2.0 ** max(high, low + 1) * 1.06)
    panel.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    panel.set_xlabel(_BYTES_LABEL)
