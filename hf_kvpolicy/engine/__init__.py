"""The engine: one forward is one transaction over one published snapshot."""

from .composition import Composition, Schedule
from .exclusive import SUPERSEDED
from .foreign import layer_tensors
from .plan import MAX_ROLLBACK_TOKENS
from .published import RunStatistics
from .runtime import Runtime
from .shared_evidence import SharedEvidence, sharing
from .snapshot import Frontier, OpenSegment, Snapshot
from .step import Step

__all__ = [
    "MAX_ROLLBACK_TOKENS",
    "SUPERSEDED",
    "Composition",
    "Frontier",
    "OpenSegment",
    "RunStatistics",
    "Runtime",
    "Schedule",
    "SharedEvidence",
    "Snapshot",
    "Step",
    "layer_tensors",
    "sharing",
]
