"""The order in which one forward may change a cache, as a small state machine (0x0EA, 0x0EF, 0x0EG).

Every layer walks the phases from BEGIN to PACK one by one; a phase with nothing to do is still entered, so
that a no-op differs from a skipped check. PUBLISH, RELEASE and EXPORT happen once, for all layers together.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn

from ..errors import IntegrityError, StaleGenerationError
from ._checks import check_int
from .generations import Generations

__all__ = ["ALL_LAYERS", "Phase", "Transaction"]

ALL_LAYERS = -1
"""The layer an observer is told for the phases that concern all layers at once."""


class Phase(IntEnum):
    """The steps of one transaction. ATTEND precedes SCORE: attention reads published and candidate rows."""

    BEGIN = 0
    APPEND = 1
    ATTEND = 2
    SCORE = 3
    PROTECT = 4
    SELECT = 5
    VALIDATE = 6
    ADMIT = 7
    RESERVE = 8
    PACK = 9
    PUBLISH = 10
    RELEASE = 11
    EXPORT = 12


_PACK = int(Phase.PACK)
_OPEN, _PUBLISHED, _ABORTED = 0, 1, 2


class Transaction:
    """One attempt to replace the published state `parent` by `successor` in all layers at once.

    `observer(layer, phase)` is called before a phase counts as entered, with `ALL_LAYERS` for the phases
    after PACK; what it raises leaves the phase unentered. The object holds numbers only: who publishes swaps
    the state right after `publish` returns.
    Raises IntegrityError for a successor that does not follow its parent.
    """

    __slots__ = ("_observer", "_phase", "_reached", "_reason", "_status", "parent", "successor")

    def __init__(
        self,
        parent: Generations,
        successor: Generations,
        num_layers: int,
        observer: Callable[[int, Phase], None] | None = None,
    ) -> None:
        check_int("num_layers", num_layers, minimum=1)
        if not _follows(parent, successor):
            raise IntegrityError(
                f"The successor {successor} does not follow the parent {parent}: no number may go back and "
                "the cache or state generation must advance. Take it from the cache's GenerationClock."
            )
        self.parent = parent
        self.successor = successor
        self._observer = observer
        self._reached = [0] * num_layers
        self._status = _OPEN
        self._phase = Phase.BEGIN
        self._reason: str | None = None
        if observer is not None:
            observer(ALL_LAYERS, Phase.BEGIN)

    def enter(self, layer: int, phase: Phase) -> None:
        """Let `layer` enter `phase`: the one it is in (again) or the next one, up to PACK.

        Raises IntegrityError for any other phase, an unknown layer or a closed transaction.
        """
        reached = self._reached
        if self._status or not 0 <= layer < len(reached) or phase > _PACK or not 0 <= phase - reached[layer] <= 1:
            self._refuse_entry(layer, phase)
        if self._observer is not None:
            self._observer(layer, phase)
        reached[layer] = phase

    def enter_through(self, layer: int, phase: Phase) -> None:
        """Let `layer` enter every phase it has not entered yet, up to and including `phase` (no-op phases).

        Raises IntegrityError as `enter` does.
        """
        if self._status or not 0 <= layer < len(self._reached) or phase <= self._reached[layer]:
            self.enter(layer, phase)
            return
        if self._observer is None and phase <= _PACK:
            self._reached[layer] = phase  # what the loop below comes to when nobody watches
            return
        for step in range(self._reached[layer] + 1, phase + 1):
            self.enter(layer, Phase(step))

    def publish(self, current: Generations) -> None:
        """Compare and publish: make the successor the visible state of all layers at once.

        `current` is what is published now. Raises StaleGenerationError when it is not the parent (the
        transaction stays open; abort it and begin again) and IntegrityError while a layer has not reached
        PACK.
        """
        if self._status:
            self._refuse_closed("publish")
        if current != self.parent:
            raise StaleGenerationError(
                f"The transaction began at {self.parent}, but {current} is published now. Abort it and "
                "repeat the work on the current state."
            )
        unpacked = [layer for layer, reached in enumerate(self._reached) if reached < _PACK]
        if unpacked:
            raise IntegrityError(
                f"Layers {unpacked} have not reached PACK, and a cache is published for all layers at once. "
                "Enter the missing phases of these layers, or abort."
            )
        self._announce(Phase.PUBLISH)
        self._phase = Phase.PUBLISH
        self._status = _PUBLISHED

    def release(self) -> None:
        """Note that the parent's own rows may be reused; legal once, after `publish`, else IntegrityError."""
        self._after(Phase.PUBLISH, Phase.RELEASE)

    def export(self) -> None:
        """Note that hand-offs may name the successor; legal once, after `release`, else IntegrityError."""
        self._after(Phase.RELEASE, Phase.EXPORT)

    def abort(self, reason: str) -> None:
        """Close an unpublished transaction; its parent stays published. A second abort changes nothing.

        Raises IntegrityError after PUBLISH: readers may hold the successor, so a correction is a new
        successor.
        """
        if self._status == _PUBLISHED:
            raise IntegrityError(
                f"The transaction published {self.successor} and cannot be aborted ({reason}): readers may "
                "already hold the successor. Publish a compensating successor instead."
            )
        if self._status == _OPEN:
            self._phase = self.phase
            self._reason = reason
            self._status = _ABORTED

    @property
    def phase(self) -> Phase:
        """How far the whole transaction came: the least advanced layer until PUBLISH; kept by an abort."""
        return Phase(min(self._reached)) if self._status == _OPEN else self._phase

    @property
    def is_open(self) -> bool:
        """Whether phases may still be entered: neither published nor aborted."""
        return self._status == _OPEN

    @property
    def is_published(self) -> bool:
        """Whether the successor is the published state."""
        return self._status == _PUBLISHED

    @property
    def abort_reason(self) -> str | None:
        """The reason of the first abort, or None."""
        return self._reason

    def layer_phase(self, layer: int) -> Phase:
        """Return the last phase that `layer` entered."""
        return Phase(self._reached[layer])

    def _after(self, required: Phase, phase: Phase) -> None:
        if self._status != _PUBLISHED or self._phase != required:
            raise IntegrityError(
                f"{phase.name} follows {required.name}, but the transaction is at "
                f"{self.phase.name}{' (aborted)' if self._status == _ABORTED else ''}. Publish, then "
                "release, then export, each once."
            )
        self._announce(phase)
        self._phase = phase

    def _announce(self, phase: Phase) -> None:
        if self._observer is not None:
            self._observer(ALL_LAYERS, phase)

    def _refuse_closed(self, what: str) -> NoReturn:
        state = "published" if self._status == _PUBLISHED else f"aborted ({self._reason})"
        raise IntegrityError(f"Cannot {what}: the transaction is already {state}. Begin a new transaction.")

    def _refuse_entry(self, layer: int, phase: Phase) -> NoReturn:
        if self._status:
            self._refuse_closed(f"enter {Phase(phase).name}")
        if not 0 <= layer < len(self._reached):
            raise IntegrityError(
                f"Layer {layer} does not exist: the transaction covers layers 0 to {len(self._reached) - 1}. "
                "Open it with the cache's number of layers."
            )
        if phase > _PACK:
            raise IntegrityError(
                f"Layer {layer} cannot enter {Phase(phase).name} alone: everything after PACK happens for "
                "all layers at once. Call publish(), release() or export()."
            )
        reached = Phase(self._reached[layer])
        raise IntegrityError(
            f"Layer {layer} is at {reached.name} and cannot enter {Phase(phase).name}: phases are entered "
            f"one by one, no-ops included. Enter {Phase(min(reached + 1, _PACK)).name} next."
        )


def _follows(parent: Generations, successor: Generations) -> bool:
    advanced = successor.cache > parent.cache or successor.state > parent.state
    kept = successor.cache >= parent.cache and successor.state >= parent.state
    return advanced and kept and successor.request == parent.request and successor.policy >= parent.policy
