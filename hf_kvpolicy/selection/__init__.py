"""Selection: which rows stay."""

from .topk import Kept, keep_best, keep_best_reference, kept_index
from .units import UNITS, reduce_heads

__all__ = ["UNITS", "Kept", "keep_best", "keep_best_reference", "kept_index", "reduce_heads"]
