"""Tests of the records, their validation and the cost formulas."""
