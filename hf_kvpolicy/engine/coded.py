"""Coding rows in few bits: when they are due.

The newest rows of a layer are held as they are, in its residual. Where that has two blocks of slots, the older ones are
coded: into another block, so that no slot moves, or where one row dies for each that comes, into a block that has
become free (`coded_again.py`).

Letters: B batch rows, M map heads, W slots in use.
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..contract import QuantizationContract, RepresentationContract
from ..representation import RowRepresentation
from ..representation.quantized import QuantizedRows
from ..storage import DenseRows, stored_tensors
from ..storage.coded import CodedRows, code_due, due_blocks
from .coded_again import renewed
from .composition import Composition
from .ragged.coded import ragged_coding_faults, ragged_payload_bytes, with_owners_coded
from .snapshot import Snapshot

__all__ = ["code_layer", "coding_faults", "payload_bytes", "quantized_contract", "with_due_coded"]


def _rule_of(representation: RowRepresentation) -> QuantizedRows:
    """Return a representation that quantizes."""
    assert isinstance(representation, QuantizedRows), "only quantized rows are coded"
    return representation


def code_layer(policy: Composition, rows: DenseRows, width: int, live_BMW: Tensor) -> DenseRows:
    """Return a layer's store of so many slots with what is due coded behind its blocks; itself where nothing is."""
    rule = _rule_of(policy.representation)
    return code_due(rows, width, live_BMW, bits=rule.bits, block_rows=rule.block_rows, pinned=_pinned(policy))


def with_due_coded(policy: Composition, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot, about to be published, with what is due coded; itself where nothing is.

    Rows of a prompt that is held are not coded before it is chosen from. What was fed before rows are coded cannot be
    taken back: fewer rows would have been coded without it.
    """
    rule, pinned = _rule_of(policy.representation), _pinned(policy)
    if snapshot.open_segment is not None or not (snapshot.rows or snapshot.ragged):
        return snapshot
    if snapshot.ragged:
        with stored_tensors():
            return with_owners_coded(rule, snapshot)
    if not due_blocks(snapshot.width - pinned - snapshot.rows[0].coded_slots, rule.block_rows):
        return snapshot
    with stored_tensors():
        if policy.schedule == "every_step" and not snapshot.tail_width:
            return renewed(rule, pinned, snapshot)
        rows = tuple(
            code_layer(policy, rows, snapshot.width, snapshot.full_map(layer).live_BMW)
            for layer, rows in enumerate(snapshot.rows)
        )
    return replace(snapshot, rows=rows, evicted_at_column=snapshot.frontier.columns)


def quantized_contract(policy: Composition, scalar: str) -> RepresentationContract:
    """Return what coded rows mean to a reader; `scalar` is the dtype of rows."""
    rule = _rule_of(policy.representation)
    return RepresentationContract(
        rows="quantized_rows",
        semantic_class="lossy_quantized" if policy.schedule == "never" else "lossy_subset",
        quantization=QuantizationContract(
            code=f"int{rule.bits}",
            block_rows=rule.block_rows,
            parameter_dtype=scalar,
            full_precision_rows=rule.block_rows,
            full_precision_sinks=policy.positions == "cache_local",
        ),
    )


def payload_bytes(snapshot: Snapshot, heads: int) -> int:
    """Return the bytes of live rows, with all it takes to read them."""
    total = ragged_payload_bytes(snapshot)
    for layer, rows in enumerate(snapshot.rows):
        live_BSW = snapshot.full_map(layer).live_BMW.expand(-1, heads, -1)
        plain_bytes = int(live_BSW.sum()) * rows.row_bytes
        total += rows.payload_bytes(live_BSW) if isinstance(rows, CodedRows) else plain_bytes
    return total


def coding_faults(snapshot: Snapshot, policy: Composition) -> list[str]:
    """Return where stores are not coded as the policy says."""
    rule = policy.representation if isinstance(policy.representation, QuantizedRows) else None
    faults = ragged_coding_faults(snapshot, rule)
    for layer, rows in enumerate(snapshot.rows):
        if not isinstance(rows, CodedRows):
            continue
        found = (rows.key_blocks.bits, rows.value_blocks.bits, rows.block_rows, rows.pinned)
        if rule is None or found != (rule.bits, rule.bits, rule.block_rows, _pinned(policy)):
            faults.append(
                f"layer {layer} has rows coded in {found[0]} bits and blocks of {found[2]} rows behind {found[3]} "
                "that are not, which is not what its policy does"
            )
    if len({rows.coded_slots for rows in snapshot.rows}) > 1:
        faults.append("layers have different numbers of coded slots")
    return faults


def _pinned(policy: Composition) -> int:
    """Return how many first slots are never coded: those of rows that attention re-rotates."""
    return len(policy.pinned_tokens) if policy.positions == "cache_local" else 0
