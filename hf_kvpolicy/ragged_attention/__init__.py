"""Exact attention over ragged storage: every owner's rows are read where they lie, never padded, packed or repeated."""

from .attend import attend_ragged
from .choose import admit_ragged, ragged_backend
from .owners import buckets
from .reference import shows

__all__ = ["admit_ragged", "attend_ragged", "buckets", "ragged_backend", "shows"]
