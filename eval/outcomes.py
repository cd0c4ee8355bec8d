"""What became of a cell, in the outcome classes of the minimum evaluation protocol (0x10E)."""

from __future__ import annotations

from enum import StrEnum

import torch

from ..errors import (
    BackendAdmissionError,
    CheckpointAdmissionError,
    KVPolicyError,
    UnsupportedModelError,
)

__all__ = ["DID_NOT_ACT", "DONE", "EQUALS_FULL", "OK", "Outcome", "outcome_of_error", "status_of_error"]

OK = "ok"
# The budget holds the longest prompt of the cell: the policy is the full cache, so nothing is run.
EQUALS_FULL = "equals full"
# What need not be tried again.
DONE = (OK, EQUALS_FULL)
DID_NOT_ACT = "failed: policy did not act"


class Outcome(StrEnum):
    """Dropping any of these from a table would make a policy look better than it is."""

    QUALITY_VALID = "quality-valid"
    QUALITY_DEGRADED = "quality-degraded"
    RUNTIME_INADMISSIBLE = "runtime-inadmissible"
    CHECKPOINT_INCOMPATIBLE = "checkpoint-incompatible"
    BACKEND_INCOMPATIBLE = "backend-incompatible"
    UNMEASURED = "unmeasured"


def outcome_of_error(error: Exception) -> Outcome:
    """The class of a run that raised; an error nobody raised on purpose leaves the policy unmeasured."""
    if isinstance(error, CheckpointAdmissionError | UnsupportedModelError):
        return Outcome.CHECKPOINT_INCOMPATIBLE
    if isinstance(error, BackendAdmissionError):
        return Outcome.BACKEND_INCOMPATIBLE
    if isinstance(error, KVPolicyError | torch.OutOfMemoryError | MemoryError):
        return Outcome.RUNTIME_INADMISSIBLE
    return Outcome.UNMEASURED


def status_of_error(error: Exception) -> str:
    """One line for the records: what failed, by class."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "failed: out of memory"
    return f"failed: {type(error).__name__}"
