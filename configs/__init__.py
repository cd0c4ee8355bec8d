"""Shipped YAML: policies, sweeps, models."""
