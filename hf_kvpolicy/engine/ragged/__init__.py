"""Forwards over ragged storage: the same transaction and the same axes, owner by owner.

A dense forward scores and packs [B, S, N] tensors at once; here every owner has rows of its own number, so scores,
masks and gathers are made for one owner at a time and nothing is ever padded to a common length.
"""

from .append import RaggedAppendStep
from .blocks import BlockDecodeStep, due_blocks
from .decode import RaggedDecodeStep
from .deferred import decide_appended_ragged, laid_behind_ragged
from .prune import PruningStep, plan_pruning
from .segment import RaggedSegmentStep

__all__ = [
    "BlockDecodeStep",
    "PruningStep",
    "RaggedAppendStep",
    "RaggedDecodeStep",
    "RaggedSegmentStep",
    "decide_appended_ragged",
    "due_blocks",
    "laid_behind_ragged",
    "plan_pruning",
]
