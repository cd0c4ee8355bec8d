"""Allocation: how many rows each owner may keep."""

from .apportion import apportion, apportion_reference
from .budget import Budget, parse_budget
from .exact import Number

__all__ = ["Budget", "Number", "apportion", "apportion_reference", "parse_budget"]
