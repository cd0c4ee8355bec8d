"""Which kind of step a forward is."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from ..allocation import NO_LIMIT_ROWS
from ..errors import ConfigError
from .append import AppendStep
from .composition import Composition
from .evict import EvictStep
from .inputs import ForwardInputs
from .ragged import (
    BlockDecodeStep,
    PruningStep,
    RaggedAppendStep,
    RaggedDecodeStep,
    RaggedSegmentStep,
    due_blocks,
    plan_pruning,
)
from .replacing import replacing_step
from .ring import RingStep
from .segment import SegmentStep
from .snapshot import Frontier, Snapshot
from .step import Step

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["MAX_ROLLBACK_TOKENS", "budget_rows", "plan_step", "selects_segments"]

# Queries held beyond the observation window while a prompt waits for acceptance.
MAX_ROLLBACK_TOKENS = 64


def plan_step(runtime: Runtime, inputs: ForwardInputs) -> Step:
    """Return the step that runs a forward: append, ring or evict, or a segment whose rows compete.

    Raises:
        ConfigError: the policy would drop what the caller wants to read, or to take back.
    """
    policy, snapshot = runtime.composition, runtime.snapshot
    if policy.representation.has_own_step:
        return replacing_step(runtime, inputs)
    if policy.decode_blocks is not None and runtime.recording:
        _refuse_recording(policy.policy)
    if policy.pruning is not None and not _appends(runtime, inputs):
        return _pruning_step(runtime, inputs)
    if policy.decode_blocks is not None and inputs.length == 1:
        return _block_step(runtime, inputs)
    if runtime.recording or policy.schedule == "never" or _appends(runtime, inputs):
        return _append_step(runtime, inputs)
    budget = budget_rows(runtime, inputs.frontier_after, inputs.batch)
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
    if policy.schedule in ("end_of_prefill", "in_prefill") and (
        decodes or (policy.on_append == "append" and snapshot.decision_epoch)
    ):
        return True
    if policy.schedule == "when_full" and decodes:
        budget = budget_rows(runtime, inputs.frontier_after, inputs.batch)
        after = zip(snapshot.counts, inputs.new_tokens, budget, strict=True)
        return all(held + new <= rows for held, new, rows in after)
    return policy.chunked_prefill == "hold" and not decodes


def _pruning_step(runtime: Runtime, inputs: ForwardInputs) -> Step:
    """Return the step of a prompt segment between whose layers tokens are dropped.

    Raises:
        ConfigError: a token that would be dropped is wanted later.
    """
    bounded = runtime.composition.budget is not None
    budget = budget_rows(runtime, inputs.frontier_after, inputs.batch) if bounded else None
    plan = plan_pruning(runtime, inputs, budget)
    wanted = "tokens that wait for acceptance (past recording: assisted decoding, prompt lookup)"
    wanted = wanted if runtime.recording else inputs.also_read or ""
    if plan.drops_rows and wanted:
        raise ConfigError(
            f"{runtime.composition.policy} drops tokens of a prompt between layers, so that only the last position has "
            f"an output, but the caller wants {wanted}. Call the whole model with logits_to_keep=1, as generate() "
            "does, without labels, output_hidden_states and past recording; or use a policy that compresses at the end "
            "of a prompt, such as snapkv; or decay=1 without a budget, which drops nothing."
        )
    if runtime.recording:
        return _append_step(runtime, inputs)
    _warn_consecutive(runtime, inputs)
    return PruningStep(runtime, runtime.snapshot, inputs, runtime.open_transaction(state=True), plan)


def _block_step(runtime: Runtime, inputs: ForwardInputs) -> Step:
    """Return the step of a decode token whose policy chooses among its answer's blocks."""
    due = due_blocks(runtime, inputs)
    transaction = runtime.open_transaction(state=any(due))
    return BlockDecodeStep(runtime, runtime.snapshot.packed(), inputs, transaction, due)


def _refuse_recording(policy: str) -> None:
    raise ConfigError(
        f"{policy} chooses among the tokens of an answer as they come, but past recording (assisted decoding, prompt "
        "lookup) feeds tokens that wait for acceptance. Decode without it, or use a policy that compresses at the end "
        "of a prompt, such as snapkv."
    )


def _append_step(runtime: Runtime, inputs: ForwardInputs) -> AppendStep:
    policy = runtime.composition
    kind = RaggedAppendStep if policy.storage == "ragged" else AppendStep
    step = kind(runtime, runtime.snapshot.packed(), inputs, runtime.open_transaction(state=False))
    held = policy.chunked_prefill == "hold"
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


def budget_rows(runtime: Runtime, frontier: Frontier, batch: int) -> tuple[int, ...]:
    """Return the rows each owner may keep per batch row; fixed at the end of the first prompt."""
    if runtime.snapshot.budget_rows is not None:
        return runtime.snapshot.budget_rows
    policy, geometry = runtime.composition, runtime.geometry
    if policy.budget is None:
        return (NO_LIMIT_ROWS,) * batch
    return tuple(
        policy.budget.resolve_rows(
            prompt_tokens=frontier.tokens,
            owners_per_row=geometry.num_layers * policy.stored_heads(geometry),
            row_bytes=geometry.row_bytes(runtime.element_bytes() if policy.budget.kind == "bytes" else 1),
            minimum_rows=policy.minimum_rows,
        )
    )


def selects_segments(policy: Composition, snapshot: Snapshot) -> bool:
    """Whether a prompt segment is compressed at its end."""
    if policy.schedule == "end_of_prefill":
        return policy.on_append == "recompress" or not snapshot.decision_epoch
    return policy.carries_scores or policy.chunked_prefill == "hold"


def _warn_consecutive(runtime: Runtime, inputs: ForwardInputs) -> None:
    policy = runtime.composition
    unplanned = policy.chunked_prefill is None and not policy.is_positional and runtime.snapshot.last_was_segment
    if unplanned and inputs.length > 1 and not runtime.warned_segments:
        runtime.warned_segments = True
        held = "" if policy.pruning is not None else "'hold' (one selection at the end) or "
        warnings.warn(
            f"{policy.policy}: two prompt segments follow one another without a decode step; each is compressed on "
            "its own, as a new turn or a question after a text should be. If this is one prompt fed in chunks, make "
            f"the cache with chunked_prefill={held}'bounded' (each chunk is compressed on its own, and the budget "
            "holds after it).",
            stacklevel=2,
        )
