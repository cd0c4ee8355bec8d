"""The records of merged layers: their contract, what every row stands for, and what may contradict it."""

from __future__ import annotations

from .contract import (
    DEPTH_PAIRS,
    ReplacedRows,
    ReplacementContract,
    RepresentationContract,
    admit_checkpoint,
    check_replaced_rows,
    producers_of_pairs,
)
from .engine import Runtime
from .engine.merged import depth_pairs
from .geometry import CacheGeometry
from .replacements import own_spans, tokens_by_slot
from .representation import RowRepresentation
from .storage.merged import MergedTensor

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
            parameters={"interpolation": rule.interpolation, "retention": rule.retention},
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
    snapshot, heads = runtime.snapshot, runtime.geometry.num_kv_heads
    rule, listed = depth_pairs(runtime.composition.representation), []
    pairs = {pair.layers: pair for pair in snapshot.pairs}
    contract = contract_of(rule, runtime.geometry, "rows").replacement
    assert contract is not None, "rows that are merged have a contract"
    tokens, spans = tokens_by_slot(snapshot), own_spans(snapshot, heads)
    for store in snapshot.stores or contract.producer_layer_map:
        pair, layers = pairs.get((store[0], store[-1])), tuple(store)
        exact = () if pair is None else tuple(_exact(each, tokens, heads) for each in (pair.keys, pair.values))
        keys, values = exact or ((), ())
        listed.append(ReplacedRows(layers=layers, spans=spans, exact_keys=keys, exact_values=values))
    check_replaced_rows(contract, listed)
    return tuple(listed)


def faults_of_replaced(runtime: Runtime) -> list[str]:
    """Return every contradiction between the stores of pairs and what is fed."""
    faults, snapshot = [], runtime.snapshot
    width = snapshot.width
    live = snapshot.full_map(0).live_BMW[:, 0]
    for pair in snapshot.pairs:
        for name, store in (("keys", pair.keys), ("values", pair.values)):
            where, index = f"the {name} of layers {pair.layers[0]} and {pair.layers[1]}", store.index_E
            owner, slot = store.entries()
            used = index[: store.exceptions]
            if used.shape[0] != store.exceptions or bool((used[1:] <= used[:-1]).any()):
                faults.append(f"{where} list their exceptions twice or out of order")
            elif used.numel() and (int(slot.max()) >= width or int(slot.min()) < 0):
                faults.append(f"{where} have an exception outside the {width} slots in use")
            elif not bool(live.to(slot.device)[owner // store.shared_BHCD.shape[1], slot].all()):
                faults.append(f"{where} have an exception where there is no row")
            fixed = [tokens > 0 for tokens in snapshot.profile_tokens]
            if (~store.thresholds_BH.isnan()).all(-1).tolist() != fixed:
                faults.append(f"{where} have thresholds for other batch rows than those whose prompt ended")
    return faults


def _exact(store: MergedTensor, tokens: list[dict[int, int]], heads: int) -> tuple[tuple[int, ...], ...]:
    owners: list[list[int]] = [[] for _ in range(store.owners)]
    for owner, slot in zip(*(part.tolist() for part in store.entries()), strict=True):
        owners[owner].append(tokens[owner // heads][slot])
    return tuple(tuple(sorted(owner)) for owner in owners)
