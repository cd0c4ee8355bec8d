"""Allocation: how many rows each owner may keep."""

from .budget import Budget, parse_budget

__all__ = ["Budget", "parse_budget"]
