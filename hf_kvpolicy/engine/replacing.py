"""Which modules run rows that replace others, by kind of representation; none of them is imported for other rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..contract import CONDENSED, DEPTH_PAIRS, SEGMENTS
from ..errors import IntegrityError

if TYPE_CHECKING:
    from .inputs import ForwardInputs
    from .runtime import Runtime
    from .snapshot import Snapshot
    from .step import Step

__all__ = ["merge_waiting", "replacing_step"]


def replacing_step(runtime: Runtime, inputs: ForwardInputs) -> Step:
    """Return the step that runs a forward of such a policy."""
    kind = runtime.composition.representation.kind
    snapshot, transaction = runtime.snapshot, runtime.open_transaction(state=False)
    if kind == DEPTH_PAIRS:
        from .merged import MergedStep

        return MergedStep(runtime, snapshot, inputs, transaction)
    if kind == SEGMENTS:
        from .merged_tokens import MergedTokensStep

        return MergedTokensStep(runtime, snapshot, inputs, transaction)
    if kind == CONDENSED:
        from .condensed import CondensedStep

        return CondensedStep(runtime, snapshot, inputs, transaction)
    raise _unknown(kind)


def merge_waiting(runtime: Runtime, accepted: Snapshot, length: int) -> Snapshot:
    """Return an accepted snapshot whose last `length` columns, which waited, are merged as if they were fed now."""
    representation = runtime.composition.representation
    if representation.kind == DEPTH_PAIRS:
        from .merged import merge_pending

        return merge_pending(representation, accepted, length)
    if representation.kind == SEGMENTS:
        from . import merged_tokens

        return merged_tokens.merge_pending(runtime, accepted, length)
    raise _unknown(representation.kind)


def _unknown(kind: str | None) -> IntegrityError:
    return IntegrityError(f"Rows of the kind {kind!r} replace others in a way that no step of the engine knows.")
