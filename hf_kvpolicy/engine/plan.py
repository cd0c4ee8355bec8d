"""Which kind of step a forward is."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from .append import AppendStep
from .composition import Composition
from .evict import EvictStep
from .inputs import ForwardInputs
from .ragged import RaggedAppendStep, RaggedDecodeStep, RaggedSegmentStep
from .ring import RingStep
from .segment import SegmentStep
from .snapshot import Snapshot
from .step import Step

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["MAX_ROLLBACK_TOKENS", "plan_step", "selects_segments"]

# Queries held beyond the observation window while a prompt waits for acceptance.
MAX_ROLLBACK_TOKENS = 64


def plan_step(runtime: Runtime, inputs: ForwardInputs) -> Step:
    """Return the step that runs a forward: append, ring or evict, or a segment whose rows compete."""
    policy, snapshot = runtime.composition, runtime.snapshot
    if runtime.recording or policy.schedule == "never" or _appends(runtime, inputs):
        return _append_step(runtime, inputs)
    budget = runtime.budget_rows(inputs.frontier_after, inputs.batch)
    decodes = inputs.length == 1 and policy.schedule == "every_step" and not snapshot.tail_width
    if policy.storage == "ragged":
        if decodes and snapshot.ragged:
            return RaggedDecodeStep(runtime, snapshot, inputs, runtime.open_transaction(state=True), budget)
        _warn_consecutive(runtime, inputs)
        return RaggedSegmentStep(runtime, snapshot.packed(), inputs, runtime.open_transaction(state=True), budget)
    if decodes and snapshot.width:
        kind = EvictStep if policy.carries_scores else RingStep
        return kind(runtime, snapshot, inputs, runtime.open_transaction(state=True), budget)
    _warn_consecutive(runtime, inputs)
    return SegmentStep(runtime, snapshot, inputs, runtime.open_transaction(state=True), budget)


def _appends(runtime: Runtime, inputs: ForwardInputs) -> bool:
    """Whether these rows are taken without choosing."""
    policy, snapshot = runtime.composition, runtime.snapshot
    decodes = inputs.length == 1 and snapshot.frontier.columns > 0
    if policy.schedule == "end_of_prefill" and (decodes or (policy.on_append == "append" and snapshot.decision_epoch)):
        return True
    if policy.schedule == "when_full" and decodes:
        budget = runtime.budget_rows(inputs.frontier_after, inputs.batch)
        after = zip(snapshot.counts, inputs.new_tokens, budget, strict=True)
        return all(held + new <= rows for held, new, rows in after)
    return policy.chunked_prefill == "hold" and not policy.is_positional and not decodes


def _append_step(runtime: Runtime, inputs: ForwardInputs) -> AppendStep:
    policy = runtime.composition
    kind = RaggedAppendStep if policy.storage == "ragged" else AppendStep
    step = kind(runtime, runtime.snapshot.packed(), inputs, runtime.open_transaction(state=False))
    held = policy.chunked_prefill == "hold" and not policy.is_positional
    if policy.families is not None:
        # How wide a head's newest rows are depends on the prompt's length: all queries wait until it is known.
        if runtime.recording or (held and (inputs.length > 1 or not runtime.snapshot.frontier.columns)):
            step.hold(policy.evidence.window_queries)
    elif policy.carries_scores:
        if runtime.recording:
            # Every query waits: which of them count is known when they are accepted.
            step.hold(MAX_ROLLBACK_TOKENS)
        elif held and inputs.length > 1:
            step.hold(0)
    elif inputs.length > 1 and selects_segments(policy, runtime.snapshot) and (held or runtime.recording):
        rollback = MAX_ROLLBACK_TOKENS if runtime.recording else 0
        wanted = policy.evidence.window_queries
        step.hold(wanted + rollback if wanted else 0)
    return step


def selects_segments(policy: Composition, snapshot: Snapshot) -> bool:
    """Whether a prompt segment is compressed at its end."""
    if policy.schedule == "end_of_prefill":
        return policy.on_append == "recompress" or not snapshot.decision_epoch
    return policy.carries_scores


def _warn_consecutive(runtime: Runtime, inputs: ForwardInputs) -> None:
    policy = runtime.composition
    unplanned = policy.chunked_prefill is None and not policy.is_positional and runtime.snapshot.last_was_segment
    if unplanned and inputs.length > 1 and not runtime.warned_segments:
        runtime.warned_segments = True
        warnings.warn(
            f"{policy.policy}: two prompt segments follow one another without a decode step; each is compressed on "
            "its own. If this is one prompt fed in chunks, make the cache with chunked_prefill='hold' (one selection "
            "at the end) or 'bounded' (the budget holds after every chunk).",
            stacklevel=2,
        )
