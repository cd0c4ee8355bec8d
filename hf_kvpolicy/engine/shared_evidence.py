"""Evidence of one prompt, taken once for all caches that ask the same of it.

Scores of rows do not depend on how many of them will stay, so a prompt that is published into several caches
(`hf_kvpolicy.replay`) is scored once for each kind of evidence. Outside of that nothing is shared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

from ..contract import canonical_json
from ..evidence import Evidence

__all__ = ["SharedEvidence", "evidence_once", "sharing"]


class SharedEvidence:
    """Scores that were taken of one prompt, by what was asked. They are read, never written."""

    def __init__(self) -> None:
        self._found: dict[Hashable, Tensor] = {}

    def once(self, key: Hashable, compute: Callable[[], Tensor]) -> Tensor:
        """Return what was found for a key, computing it the first time."""
        if key not in self._found:
            self._found[key] = compute()
        return self._found[key]


_SHARED: ContextVar[SharedEvidence | None] = ContextVar("hf_kvpolicy_shared_evidence", default=None)


@contextmanager
def sharing(evidence: SharedEvidence) -> Iterator[None]:
    """Share scores within a replay."""
    token = _SHARED.set(evidence)
    try:
        yield
    finally:
        _SHARED.reset(token)


def evidence_once(evidence: Evidence, where: tuple[Hashable, ...], compute: Callable[[], Tensor]) -> Tensor:
    """Return scores of rows, shared with earlier replays of the same prompt.

    Args:
        evidence: whose scores they are; its parameters are part of the key.
        where: layer, heads, reduction and all else that the scores depend on besides the prompt.
        compute: takes them.
    """
    shared = _SHARED.get()
    if shared is None:
        return compute()
    return shared.once((evidence.name, canonical_json(evidence.describe()), *where), compute)
