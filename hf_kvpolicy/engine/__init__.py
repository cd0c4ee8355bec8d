"""The engine: one forward is one transaction over one published snapshot."""

from .composition import Composition, Schedule
from .runtime import MAX_ROLLBACK_TOKENS, RunStatistics, Runtime
from .snapshot import Frontier, OpenSegment, Snapshot

__all__ = [
    "MAX_ROLLBACK_TOKENS",
    "Composition",
    "Frontier",
    "OpenSegment",
    "RunStatistics",
    "Runtime",
    "Schedule",
    "Snapshot",
]
