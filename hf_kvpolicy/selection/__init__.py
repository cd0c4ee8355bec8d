"""Selection: which rows stay."""

from .classes import (
    NEWEST,
    OPEN,
    PINNED,
    PUNCTUATION,
    SPECIAL,
    ProtectedParts,
    are_open,
    class_ranks,
    keep_by_class,
    keep_by_class_reference,
    lowest_rows,
    row_classes,
    weakest_rows,
)
from .topk import Kept, keep_best, keep_best_reference, kept_index
from .units import UNITS, reduce_heads, reduce_layers

__all__ = [
    "NEWEST",
    "OPEN",
    "PINNED",
    "PUNCTUATION",
    "SPECIAL",
    "UNITS",
    "Kept",
    "ProtectedParts",
    "are_open",
    "class_ranks",
    "keep_best",
    "keep_best_reference",
    "keep_by_class",
    "keep_by_class_reference",
    "kept_index",
    "lowest_rows",
    "reduce_heads",
    "reduce_layers",
    "row_classes",
    "weakest_rows",
]
