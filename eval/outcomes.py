"""What became of a cell, in the outcome classes of the minimum evaluation protocol (0x10E)."""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import torch

from ..errors import (
    BackendAdmissionError,
    CheckpointAdmissionError,
    KVPolicyError,
    UnsupportedModelError,
)

if TYPE_CHECKING:
    from .statistics import Difference

__all__ = [
    "DEFAULT_DELTA",
    "DID_NOT_ACT",
    "DONE",
    "EQUALS_FULL",
    "OK",
    "Outcome",
    "outcome_of_difference",
    "outcome_of_error",
    "status_of_error",
]

OK = "ok"
EQUALS_FULL = "equals-full"
DID_NOT_ACT = "failed: policy did not act"

# A loss of score, or of nats per token where that is the measure, up to this much is none to speak of.
DEFAULT_DELTA = 0.05


class Outcome(StrEnum):
    """Dropping any of these from a table would make a policy look better than it is."""

    QUALITY_VALID = "quality-valid"
    QUALITY_DEGRADED = "quality-degraded"
    RUNTIME_INADMISSIBLE = "runtime-inadmissible"
    CHECKPOINT_INCOMPATIBLE = "checkpoint-incompatible"
    BACKEND_INCOMPATIBLE = "backend-incompatible"
    UNMEASURED = "unmeasured"
    # Beyond the protocol: the budget takes nothing from any prompt, so the full cache's result is its own.
    EQUALS_FULL = "equals-full"


# What need not be tried again.
DONE = (OK, EQUALS_FULL)


def outcome_of_difference(difference: Difference, delta: float) -> Outcome:
    """The class of a measured `policy - full`, larger being better; unmeasured where the examples are too few to say.

    Degraded: the whole interval lies below `-delta`. Valid: it lies above, and the examples are enough to have met a
    loss. An interval with `-delta` in it shows neither, and one example has no spread to make one of.
    """
    if difference.n < 2:
        return Outcome.UNMEASURED
    if difference.high < -delta:
        return Outcome.QUALITY_DEGRADED
    is_valid = difference.low > -delta and difference.supports_absence
    return Outcome.QUALITY_VALID if is_valid else Outcome.UNMEASURED


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
