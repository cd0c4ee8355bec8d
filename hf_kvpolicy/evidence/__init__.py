"""Evidence: what makes a row worth keeping."""

from .base import Evidence, LayerObservation, Visibility
from .carried import CarriedEvidence, QueryBlock, reduce_group
from .cumulative import CumulativeAttention
from .gumbel import GumbelSoftmax, gumbel_noise
from .low_scores import LowScoreHistory
from .masking import mask_logits_
from .mean_attention import MeanAttention
from .random import SeededRandom, hash_unit_reference
from .recency import Recency
from .recent_attention import RecentAttention
from .segment_sums import SegmentAttention
from .window_votes import GROUPS, Pooling, WindowVotes, pool_reference, window_votes_reference

__all__ = [
    "GROUPS",
    "CarriedEvidence",
    "CumulativeAttention",
    "Evidence",
    "GumbelSoftmax",
    "LayerObservation",
    "LowScoreHistory",
    "MeanAttention",
    "Pooling",
    "QueryBlock",
    "Recency",
    "RecentAttention",
    "SeededRandom",
    "SegmentAttention",
    "Visibility",
    "WindowVotes",
    "gumbel_noise",
    "hash_unit_reference",
    "mask_logits_",
    "pool_reference",
    "reduce_group",
    "window_votes_reference",
]
