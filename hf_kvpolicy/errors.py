"""Every error this library raises on purpose. All derive from `KVPolicyError`.

A message is a full sentence: what was asked, what was found, what is allowed, what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = [
    "BackendAdmissionError",
    "BudgetError",
    "CapacityError",
    "CheckpointAdmissionError",
    "ConfigError",
    "IntegrityError",
    "KVPolicyError",
    "ManifestError",
    "NotComparableError",
    "SelectionError",
    "StaleGenerationError",
    "UnsupportedModelError",
    "did_you_mean",
]


class KVPolicyError(Exception):
    """Base of all errors raised by hf_kvpolicy."""


class ConfigError(KVPolicyError, ValueError):
    """An option, argument or call does not fit what the library accepts."""


class NotComparableError(ConfigError):
    """Results are asked to be ranked that differ in what their numbers depend on."""


class ManifestError(KVPolicyError, ValueError):
    """A policy contract combines properties that exclude one another."""


class BudgetError(KVPolicyError, ValueError):
    """A budget cannot be resolved into a whole, positive number of rows."""


class SelectionError(KVPolicyError, RuntimeError):
    """A selection breaks its contract (range, order, duplicates, protection, budget, non-finite scores)."""


class StaleGenerationError(KVPolicyError, RuntimeError):
    """A record or transaction refers to a generation that is no longer the published one."""


class BackendAdmissionError(KVPolicyError, RuntimeError):
    """The attention backend cannot consume the requested view."""


class CheckpointAdmissionError(KVPolicyError, RuntimeError):
    """The loaded checkpoint lacks what the policy needs."""


class UnsupportedModelError(KVPolicyError, TypeError):
    """The model family, or a property of this model, is not supported."""


class CapacityError(KVPolicyError, RuntimeError):
    """A physical or declared capacity (slots, rollback depth) is exceeded."""


class IntegrityError(KVPolicyError, RuntimeError):
    """Stored state contradicts itself; the cache must not be read further."""


def did_you_mean(word: object, allowed: Iterable[str]) -> str:
    """Return ' Did you mean ...?' for the closest allowed word, or '' if none is close or what was given is no word."""
    close = difflib.get_close_matches(word, list(allowed), n=1) if isinstance(word, str) else []
    return f" Did you mean {close[0]!r}?" if close else ""
