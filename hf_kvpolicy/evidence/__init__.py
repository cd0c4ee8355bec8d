"""Evidence: what makes a row worth keeping."""

from .base import Evidence, LayerObservation, Visibility
from .random import SeededRandom, hash_unit_reference
from .recency import Recency
from .window_votes import GROUPS, Pooling, WindowVotes, pool_reference, window_votes_reference

__all__ = [
    "GROUPS",
    "Evidence",
    "LayerObservation",
    "Pooling",
    "Recency",
    "SeededRandom",
    "Visibility",
    "WindowVotes",
    "hash_unit_reference",
    "pool_reference",
    "window_votes_reference",
]
