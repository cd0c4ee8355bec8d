"""The demo's picture: which prompt positions each policy kept in each layer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
import numpy as np
import numpy.typing as npt

mpl.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

# Wider than this a position is less than a pixel and single kept rows vanish between pixels.
MAX_BINS = 1000
NEEDLE_COLOUR = "#d1495b"


@dataclass(frozen=True)
class KeptMap:
    title: str
    share: npt.NDArray[np.float64]
    """[layers, positions]: the share of KV heads that keep the position."""


def _binned(share: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """At most MAX_BINS columns; a bin shows its best kept position, so a lone sink row stays visible."""
    layers, positions = share.shape
    width = -(-positions // MAX_BINS)
    padded = np.zeros((layers, -(-positions // width) * width))
    padded[:, :positions] = share
    return padded.reshape(layers, -1, width).max(axis=2)


def _draw(axes: Axes, kept: KeptMap, needle: tuple[int, int]) -> mpl.image.AxesImage:
    layers, positions = kept.share.shape
    image = axes.imshow(
        _binned(kept.share), aspect="auto", interpolation="nearest", cmap="YlGnBu", vmin=0, vmax=1,
        extent=(0, positions, layers - 0.5, -0.5),
    )  # fmt: skip
    axes.set_title(kept.title, fontsize=11, loc="left")
    axes.set_ylabel("layer")
    for edge in needle:
        axes.axvline(edge, color=NEEDLE_COLOUR, linewidth=1.2)
    return image


def save_picture(path: Path, maps: list[KeptMap], needle: tuple[int, int], heading: str) -> None:
    figure, rows = plt.subplots(len(maps), 1, figsize=(12, 2.3 * len(maps) + 1), sharex=True, layout="constrained")
    panels = np.atleast_1d(rows)
    for axes, kept in zip(panels, maps, strict=True):
        image = _draw(axes, kept, needle)
    panels[0].annotate(
        "needle", (needle[1], 0.85), xytext=(8, 0), xycoords=("data", "axes fraction"),
        textcoords="offset points", color="white", va="center", fontsize=10,
        bbox={"facecolor": NEEDLE_COLOUR, "edgecolor": "none", "pad": 3},
    )  # fmt: skip
    panels[-1].set_xlabel("position in the prompt (the question is at the right end)")
    figure.colorbar(image, ax=panels, label="share of KV heads that keep the position", fraction=0.03, pad=0.01)
    figure.suptitle(heading, fontsize=13, x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=140)
    plt.close(figure)
