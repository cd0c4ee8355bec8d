"""How much of what the context is worth a policy keeps: scores between no context at all and the full cache.

A question that is answered without its context measures the model's memory, not its cache.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..errors import NotComparableError

__all__ = ["MINIMUM_RANGE", "normalised_retention", "retention_curve"]

# With less between the two ends, noise in either moves a curve more than any policy does.
MINIMUM_RANGE = 0.2


def normalised_retention(score: float, *, full: float, floor: float) -> float:
    """`(score - floor) / (full - floor)`: 1 is the full cache, 0 is no context; outside [0, 1] where noise puts it.

    Args:
        score: mean score of a policy.
        full: mean score of the full cache on the same examples.
        floor: mean score on the same questions without their context.

    Raises:
        NotComparableError: `full - floor` is below `MINIMUM_RANGE`.
    """
    span = full - floor
    # Rounded, so that 0.7 - 0.5 is 0.2.
    if round(span, 9) < MINIMUM_RANGE:
        raise NotComparableError(
            f"The full cache scores {full:.2f} and no context {floor:.2f}: {span:.2f} between them is too little to "
            f"draw retention in; at least {MINIMUM_RANGE} is needed. Take a task that needs its context and that the "
            "model can do."
        )
    return (score - floor) / span


def retention_curve(scores: Mapping[float, float], *, full: float, floor: float) -> dict[float, float]:
    """Retention by budget, smallest first; `scores` are mean scores by budget.

    Raises:
        NotComparableError: `full - floor` is below `MINIMUM_RANGE`.
    """
    return {budget: normalised_retention(scores[budget], full=full, floor=floor) for budget in sorted(scores)}
