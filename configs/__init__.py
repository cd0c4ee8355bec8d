"""Shipped files: policies, sweeps and models in YAML, profiles of checkpoints in JSON."""
