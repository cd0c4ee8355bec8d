"""PyramidKV: many rows for the lower layers, few for the upper ones, in equal steps (0x08B).

Source: Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling"
(arXiv 2406.02069). k_top = K / (beta m), k_bottom = 2 K / m - k_top, and layer l of m lies on the line between them.

Deviations: the released code floors the step of its line and so keeps more than the budget; `pyramid_targets` stays
exact and leaves whole rows to `apportion`. `pyramid_reference_rows` counts what the released code keeps.
"""

from __future__ import annotations

from fractions import Fraction

from ..errors import ConfigError
from ._checks import rows_beside_window
from .exact import Number, declared

__all__ = ["pyramid_reference_rows", "pyramid_reference_total_rows", "pyramid_targets"]


def pyramid_targets(total: Number, layers: int, beta: Number) -> list[Fraction]:
    """Return real targets per layer, bottom first, that sum to `total` rows. A single layer gets them all.

    Args:
        total: rows of all layers together, without protected ones.
        layers: at least 1.
        beta: the mean over the top layer's share, at least 0.5; 1 is uniform, below 1 the pyramid stands on its tip.

    Raises:
        ConfigError: no layer, or a beta that leaves the bottom layer less than nothing.
    """
    rows, slope = declared("total", total), declared("beta", beta)
    if layers < 1:
        raise ConfigError(f"A pyramid over {layers} layers was asked for; give at least 1 layer.")
    if slope < Fraction(1, 2):
        raise ConfigError(
            f"beta={beta!r} would give the bottom layer a negative number of rows. Give at least 0.5; 1 is uniform."
        )
    if layers == 1:
        return [rows]
    top = rows / (slope * layers)
    bottom = 2 * rows / layers - top
    return [bottom - layer * (bottom - top) / (layers - 1) for layer in range(layers)]


def pyramid_reference_rows(budget: int, window: int, beta: int, layers: int, tokens: int) -> list[int]:
    """Return the rows each layer's heads keep in the released code, window rows included.

    Prompts shorter than the budget are kept whole, prompts below twice the budget without window are cut to the budget
    in every layer, longer ones get the pyramid. Its step is floored, so the layers may hold more than layers x
    budget together; `pyramid_reference_total_rows` says how many. One layer has no line and keeps the budget.

    Args:
        budget: mean rows per layer and head, window included.
        window: protected last rows, below the budget.
        beta: a whole number of at least 1.
        layers: at least 1.
        tokens: of the prompt.

    Raises:
        ConfigError: no layer, or beta below 1.
        BudgetError: the window leaves no row to choose.
    """
    if layers < 1 or beta < 1:
        raise ConfigError(f"A pyramid needs at least 1 layer and beta of at least 1; got {layers=} and {beta=}.")
    base = rows_beside_window(budget, window)
    if tokens < budget:
        return [tokens] * layers
    if tokens < 2 * base or layers == 1:
        return [budget] * layers
    least = base // beta
    most = 2 * base - least
    if most >= tokens - window:
        most = tokens - window
        least = 2 * base - most
    step = (most - least) // (layers - 1)
    return [most - layer * step + window for layer in range(layers)]


def pyramid_reference_total_rows(budget: int, window: int, beta: int, layers: int, tokens: int) -> int:
    """Return the rows of all layers that `pyramid_reference_rows` adds up to, for one head; raises as it does."""
    return sum(pyramid_reference_rows(budget, window, beta, layers, tokens))
