"""Allocation: how many rows each owner may keep."""

from .base import UNIFORM, Allocation, Demand, UniformAllocation
from .budget import Budget, parse_budget
from .depth import DepthDecay
from .schedules import AdaptiveAllocation, HeadTableAllocation, PyramidAllocation, ZigZagAllocation

__all__ = [
    "UNIFORM",
    "AdaptiveAllocation",
    "Allocation",
    "Budget",
    "Demand",
    "DepthDecay",
    "HeadTableAllocation",
    "PyramidAllocation",
    "UniformAllocation",
    "ZigZagAllocation",
    "parse_budget",
]
