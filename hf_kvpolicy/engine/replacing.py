"""Which modules run rows that are not kept as they are, by kind; none of them is imported for other rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..contract import CONDENSED, SEGMENTS
from ..errors import IntegrityError

if TYPE_CHECKING:
    from ..storage import DenseRows
    from .composition import Composition
    from .inputs import ForwardInputs
    from .merged import LayerMerging
    from .runtime import Runtime
    from .snapshot import Snapshot
    from .step import Step

__all__ = ["merge_waiting", "merging_of", "replacing_step", "stored_fields", "with_due"]


def replacing_step(runtime: Runtime, inputs: ForwardInputs) -> Step:
    """Return the step that runs a forward of a policy with a step of its own kind."""
    kind = runtime.composition.representation.kind
    snapshot, transaction = runtime.snapshot, runtime.open_transaction(state=False)
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
    if representation.kind == SEGMENTS:
        from . import merged_tokens

        return merged_tokens.merge_pending(runtime, accepted, length)
    raise _unknown(representation.kind)


def merging_of(policy: Composition, snapshot: Snapshot) -> LayerMerging | None:
    """Return what runs layers that are merged two by two; None where none are."""
    if not policy.merges_layers:
        return None
    from .merged import LayerMerging

    return LayerMerging(policy.representation, snapshot)


def stored_fields(merging: LayerMerging | None, rows: dict[int, DenseRows]) -> dict[str, Any]:
    """Return a snapshot's fields over the buffers of layers by themselves, and over what pairs share."""
    by_layer = tuple(rows[layer] for layer in sorted(rows))
    return {"rows": by_layer} if merging is None else {"rows": by_layer, "pairs": merging.pairs}


def with_due(policy: Composition, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot, about to be published, with what is due coded in few bits, or merged."""
    if policy.quantizes:
        from .coded import with_due_coded  # not imported where rows stay as they are

        return with_due_coded(policy, snapshot)
    if policy.merges_layers:
        from .merged import with_merged

        return with_merged(policy.representation, snapshot)
    return snapshot


def _unknown(kind: str | None) -> IntegrityError:
    return IntegrityError(f"Rows of the kind {kind!r} replace others in a way that no step of the engine knows.")
