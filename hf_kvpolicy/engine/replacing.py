"""Which module of the engine runs a representation whose rows replace others; imported where a cache has it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..contract import CONDENSED, DEPTH_PAIRS
from ..errors import IntegrityError
from .inputs import ForwardInputs
from .step import Step

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["replacing_step"]


def replacing_step(runtime: Runtime, inputs: ForwardInputs) -> Step:
    """Return the step of a forward whose rows stand for others.

    Raises:
        IntegrityError: the representation has no step.
    """
    name = runtime.composition.representation.name
    transaction = runtime.open_transaction(state=False)
    if name == DEPTH_PAIRS:
        from .merged import MergedStep

        return MergedStep(runtime, runtime.snapshot, inputs, transaction)
    if name == CONDENSED:
        from .condensed import CondensedStep

        return CondensedStep(runtime, runtime.snapshot, inputs, transaction)
    raise IntegrityError(f"{name} replaces rows in a way that no step of the engine knows.")
