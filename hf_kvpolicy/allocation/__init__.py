"""Allocation: how many rows each owner may keep, and for FastGen by which kind of policy."""

from .adaptive import global_top_counts, global_top_counts_reference, safeguarded_targets
from .apportion import apportion, apportion_reference
from .base import UNIFORM, Allocation, Demand, UniformAllocation
from .budget import NO_LIMIT_ROWS, Budget, parse_budget
from .depth import BlockDecay, DepthDecay
from .exact import Number
from .families import FAMILIES, FULL_FAMILY, Family, FamilyRule, FamilyTerms, HeadMass
from .head_table import head_reference_rows, head_reference_total_rows, head_targets, query_to_kv_importance
from .pyramid import pyramid_reference_rows, pyramid_reference_total_rows, pyramid_targets
from .recovery import Candidate, PolicyChoice, choose_policy, smallest_enough
from .schedules import AdaptiveAllocation, HeadTableAllocation, PyramidAllocation, ZigZagAllocation
from .zigzag import minimum_rows_for_mass, minimum_rows_for_output, zigzag_targets

__all__ = [
    "FAMILIES",
    "FULL_FAMILY",
    "NO_LIMIT_ROWS",
    "UNIFORM",
    "AdaptiveAllocation",
    "Allocation",
    "BlockDecay",
    "Budget",
    "Candidate",
    "Demand",
    "DepthDecay",
    "Family",
    "FamilyRule",
    "FamilyTerms",
    "HeadMass",
    "HeadTableAllocation",
    "Number",
    "PolicyChoice",
    "PyramidAllocation",
    "UniformAllocation",
    "ZigZagAllocation",
    "apportion",
    "apportion_reference",
    "choose_policy",
    "global_top_counts",
    "global_top_counts_reference",
    "head_reference_rows",
    "head_reference_total_rows",
    "head_targets",
    "minimum_rows_for_mass",
    "minimum_rows_for_output",
    "parse_budget",
    "pyramid_reference_rows",
    "pyramid_reference_total_rows",
    "pyramid_targets",
    "query_to_kv_importance",
    "safeguarded_targets",
    "smallest_enough",
    "zigzag_targets",
]
