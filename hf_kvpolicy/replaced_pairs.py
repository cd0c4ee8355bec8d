"""The records of merged layers: their contract, what every row stands for, and what may contradict it."""

from __future__ import annotations

import torch

from .contract import (
    DEPTH_PAIRS,
    ReplacedRows,
    ReplacementContract,
    RepresentationContract,
    admit_checkpoint,
    check_replaced_rows,
    producers_of_pairs,
)
from .engine import Runtime, Snapshot
from .engine.merged import depth_pairs
from .geometry import CacheGeometry
from .records import positions_of
from .representation import RowRepresentation
from .storage import RowMap
from .storage.merged import MergedPair, MergedTensor

__all__ = ["contract_of", "faults_of_replaced", "replaced_rows_of"]


def contract_of(representation: RowRepresentation, geometry: CacheGeometry, scalar: str) -> RepresentationContract:
    """Return what merged layers mean to a reader; `scalar` is the dtype of rows."""
    rule = depth_pairs(representation)
    admit_checkpoint(DEPTH_PAIRS)
    stores = producers_of_pairs(geometry.num_layers, rule.pairs)
    read = {layer: layers[0] for layers in stores for layer in layers}
    return RepresentationContract(
        rows="replacement_rows",
        semantic_class="lossy_replacement",
        consumer_schema=rule.consumer_schema,
        replacement=ReplacementContract(
            representation_kind=DEPTH_PAIRS,
            producer_layer_map=stores,
            consumer_layer_map=[read[layer] for layer in range(geometry.num_layers)],
            parameters={
                "interpolation": rule.interpolation,
                "retention": rule.retention,
                "threshold_of": "rows kept of the first prompt",
            },
            side_metadata={
                "magnitudes": "float32 [lower|deeper, batch, kv_head, token] for keys and for values",
                "exception_rows": f"{scalar} [lower|deeper, exception, channel] for keys and for values",
                "exception_indices": "int32 [exception] for keys and for values",
            },
        ),
    )


def replaced_rows_of(runtime: Runtime) -> tuple[ReplacedRows, ...]:
    """Return what every published row stands for, store by store.

    Raises:
        SelectionError: the rows are not those that the cache's contract names.
    """
    snapshot = runtime.snapshot
    rule, listed = depth_pairs(runtime.composition.representation), []
    pairs = {pair.layers: pair for pair in snapshot.pairs}
    contract = contract_of(rule, runtime.geometry, "rows").replacement
    assert contract is not None, "rows that are merged have a contract"
    for store in snapshot.stores or contract.producer_layer_map:
        pair, layers = pairs.get((store[0], store[-1])), tuple(store)
        owners = [own for batch in range(snapshot.batch_size) for own in positions_of(runtime, store[0], batch)]
        spans = tuple(tuple((token, token) for token in own.tolist()) for own in owners)
        exact = () if pair is None else tuple(_exact(pair, each, snapshot) for each in (pair.keys, pair.values))
        keys, values = exact or ((), ())
        listed.append(ReplacedRows(layers=layers, spans=spans, exact_keys=keys, exact_values=values))
    check_replaced_rows(contract, listed)
    return tuple(listed)


def faults_of_replaced(runtime: Runtime) -> list[str]:
    """Return every contradiction between the stores of pairs and what is fed."""
    faults, snapshot = [], runtime.snapshot
    fixed = [tokens > 0 for tokens in snapshot.profile_tokens or (0,) * snapshot.batch_size]
    for pair in snapshot.pairs:
        table, width = snapshot.full_map(pair.layers[0]), pair.merged_slots
        if not _same_rows(table, snapshot.full_map(pair.layers[1])):
            faults.append(f"layers {pair.layers[0]} and {pair.layers[1]} share rows, but hold different tokens")
        for name, store in (("keys", pair.keys), ("values", pair.values)):
            where, index = f"the {name} of layers {pair.layers[0]} and {pair.layers[1]}", store.index_E
            heads = store.shared_BHCD.shape[1]
            live = table.live_BMW.to(index.device).expand(-1, heads, -1)
            owner, slot = store.entries()
            used = index[: store.exceptions]
            if used.shape[0] != store.exceptions or bool((used[1:] <= used[:-1]).any()):
                faults.append(f"{where} list their exceptions twice or out of order")
            elif used.numel() and (int(slot.max()) >= width or int(slot.min()) < 0):
                faults.append(f"{where} have an exception outside the {width} slots in use")
            elif not bool(live[owner // heads, owner % heads, slot].all()):
                faults.append(f"{where} have an exception where there is no row")
            if (~store.thresholds_BH.isnan()).all(-1).tolist() != fixed:
                faults.append(f"{where} have thresholds for other batch rows than those whose prompt ended")
    return faults


def _same_rows(one: RowMap, other: RowMap) -> bool:
    """Whether two maps name the same tokens, slot by slot."""
    live, also = one.live_BMW, other.live_BMW.to(one.device)
    return torch.equal(live, also) and torch.equal(one.tokens_BMW[live], other.tokens_BMW.to(one.device)[also])


def _exact(pair: MergedPair, store: MergedTensor, snapshot: Snapshot) -> tuple[tuple[int, ...], ...]:
    """Return, per owner, the tokens whose rows are held as they were: exceptions, and what is not merged yet."""
    table, heads = snapshot.full_map(pair.layers[0]), store.shared_BHCD.shape[1]
    tokens_OW, held_OW = (part.expand(-1, heads, -1).flatten(0, 1).cpu() for part in (table.tokens_BMW, table.live_BMW))
    held_OW = held_OW.clone()
    held_OW[:, : pair.merged_slots] = False
    owner, slot = (part.cpu() for part in store.entries())
    held_OW[owner, slot] = True
    return tuple(tuple(sorted(own[held].tolist())) for own, held in zip(tokens_OW, held_OW, strict=True))
