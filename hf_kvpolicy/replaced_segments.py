"""The records of merged tokens: their contract, the span behind every row, and what may contradict it."""

from __future__ import annotations

from itertools import pairwise

import torch

from .contract import (
    SEGMENTS,
    ReplacedRows,
    ReplacementContract,
    RepresentationContract,
    Span,
    admit_checkpoint,
    check_replaced_rows,
)
from .engine import Runtime, Snapshot
from .engine.merged_tokens import token_segments
from .geometry import CacheGeometry
from .representation import RowRepresentation

__all__ = ["contract_of", "faults_of_replaced", "replaced_rows_of"]


def contract_of(representation: RowRepresentation, geometry: CacheGeometry, scalar: str) -> RepresentationContract:
    """Return what merged tokens mean to a reader; `scalar` is the dtype of closed segments."""
    rule, layers = token_segments(representation), range(geometry.num_layers)
    admit_checkpoint(SEGMENTS, SEGMENTS)
    return RepresentationContract(
        rows="replacement_rows",
        semantic_class="lossy_replacement",
        consumer_schema=rule.consumer_schema,
        replacement=ReplacementContract(
            representation_kind=SEGMENTS,
            graph_revision="dmc",
            producer_layer_map=[(layer,) for layer in layers],
            consumer_layer_map=list(layers),
            parameters={"channel": rule.channel, "offset": rule.offset, "ratio": rule.ratio},
            side_metadata={
                "masses": "float32 [row]",
                "trailing_segments": "float32 [batch, kv_head, channel of key before rotation, then of value]",
                "trailing_masses": "float32 [batch, kv_head]",
            },
        ),
    )


def replaced_rows_of(runtime: Runtime) -> tuple[ReplacedRows, ...]:
    """Return the span of tokens behind every published row, layer by layer.

    Raises:
        SelectionError: the spans do not ascend.
    """
    snapshot, geometry = runtime.snapshot, runtime.geometry
    contract = contract_of(runtime.composition.representation, geometry, "rows").replacement
    assert contract is not None, "rows that are merged have a contract"
    listed = [
        ReplacedRows(layers=(layer,), spans=_spans(snapshot, layer) if snapshot.ragged else ())
        for layer in range(geometry.num_layers)
    ]
    check_replaced_rows(contract, listed)
    return tuple(listed)


def faults_of_replaced(runtime: Runtime) -> list[str]:
    """Return every contradiction between segments, their masses and what is fed."""
    faults: list[str] = []
    snapshot = runtime.snapshot
    begun = torch.tensor([tokens > 0 for tokens in snapshot.frontier.tokens])
    if snapshot.tail_counts != tuple(begun.int().tolist()):
        faults.append(f"{list(snapshot.tail_counts)} segments still grow, but {begun.int().tolist()} rows have tokens")
    for layer, stored in enumerate(snapshot.ragged):
        where, masses, trailing = f"layer {layer}", stored.map.states_PX, stored.trailing
        if trailing is None or masses is None or masses.shape != (sum(stored.map.lengths), 1):
            faults.append(f"{where} has not one mass for each of its rows, or no segment that still grows")
            continue
        if not bool((masses > 0).all() and masses.isfinite().all()):
            faults.append(f"{where} has a row whose mass is no positive number")
        if trailing.masses_BH.shape[0] != len(begun) or not torch.equal(
            (trailing.masses_BH.cpu() > 0).all(-1) | (trailing.masses_BH.cpu() > 0).any(-1), begun
        ):
            faults.append(f"{where} has masses of growing segments that do not fit the batch rows with tokens")
        if not bool(trailing.means_BHX.isfinite().all()):
            faults.append(f"{where} has a growing segment whose row is not finite")
        for owner, spans in enumerate(_spans(snapshot, layer)):
            if any(before[1] >= after[1] for before, after in pairwise(spans)):
                faults.append(f"{where}, owner {owner} has segments that do not ascend")
    return faults


def _spans(snapshot: Snapshot, layer: int) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of every owner: each begins behind the one before, and the last ends with the newest token."""
    heads, found = snapshot.ragged[layer].map.heads, []
    for owner, table in enumerate(snapshot.ragged[layer].map.owners()):
        ends = table.tokens_BMW[0, 0].tolist()
        newest = snapshot.frontier.tokens[owner // heads] - 1
        ends += [newest] if newest >= 0 else []
        found.append(tuple((before + 1, last) for before, last in pairwise([-1, *ends])))
    return tuple(found)
