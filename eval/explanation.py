"""Two results side by side: what they share, what differs, and what is therefore not comparable (0x0FG)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .comparison import METRICS, Comparability, Disagreement, compare, differing, lineage
from .coordinates import KEYS, is_unrecorded

__all__ = ["Explanation", "explain"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why two results may or may not be compared, by every metric."""

    lineage: tuple[str, ...]
    differing: tuple[Disagreement, ...]
    # Coordinates that at least one of the two does not hold.
    unrecorded: tuple[str, ...]
    by_metric: tuple[Comparability, ...]

    def lines(self) -> list[str]:
        """The explanation as lines of text."""
        shared = ", ".join(self.lineage) or "nothing"
        found = [f"shared (lineage, which makes nothing comparable): {shared}", "different:"]
        found += [f"  {item}" for item in self.differing] or ["  nothing"]
        if self.unrecorded:
            found.append(f"not recorded: {', '.join(self.unrecorded)}")
        found.append("therefore:")
        for item in self.by_metric:
            keys = ", ".join(disagreement.key for disagreement in item.differing)
            found.append(f"  {item.metric}: {item.relation}" + (f" ({keys})" if keys else ""))
        return found


def explain(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> Explanation:
    """Compare the coordinates of two results by every metric."""
    unrecorded = tuple(key for key in KEYS if is_unrecorded(ours[key]) or is_unrecorded(theirs[key]))
    return Explanation(
        lineage=tuple(key for key in lineage(ours, theirs) if key not in unrecorded),
        differing=differing(ours, theirs, [key for key in KEYS if key not in unrecorded]),
        unrecorded=unrecorded,
        by_metric=tuple(compare(ours, theirs, metric) for metric in METRICS),
    )
