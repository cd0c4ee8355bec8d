"""Storage: slots and what lies in them."""

from .dense import DenseRows, growth_slots, stored_tensors
from .gather import gather_rows, pack_rows
from .ragged import RaggedLayer, RaggedRows
from .ragged_map import RaggedMap, owners_of
from .ragged_view import RaggedView
from .rowmap import RowMap

__all__ = [
    "DenseRows",
    "RaggedLayer",
    "RaggedMap",
    "RaggedRows",
    "RaggedView",
    "RowMap",
    "gather_rows",
    "growth_slots",
    "owners_of",
    "pack_rows",
    "stored_tensors",
]
