"""The records of condensed layers: their contract, whose rows every layer reads, and what may contradict it."""

from __future__ import annotations

from .contract import ReplacedRows, RepresentationContract, check_replaced_rows
from .engine import Runtime
from .engine.condensed import condensed_layers
from .geometry import CacheGeometry
from .replacements import own_spans
from .representation import RowRepresentation

__all__ = ["contract_of", "faults_of_replaced", "replaced_rows_of"]


def contract_of(representation: RowRepresentation, geometry: CacheGeometry, scalar: str) -> RepresentationContract:
    """Return what condensed layers mean to a reader."""
    graph = condensed_layers(representation)
    return RepresentationContract(
        rows="replacement_rows",
        semantic_class="lossy_replacement",
        consumer_schema=graph.consumer_schema,
        replacement=graph.contract(),
    )


def replaced_rows_of(runtime: Runtime) -> tuple[ReplacedRows, ...]:
    """Return the rows of every producer; each stands for its own token, in all layers that read it.

    Raises:
        SelectionError: the rows are not those that the cache's contract names.
    """
    graph = condensed_layers(runtime.composition.representation)
    spans = own_spans(runtime.snapshot, runtime.geometry.num_kv_heads)
    listed = [ReplacedRows(layers=layers, spans=spans) for layers in runtime.snapshot.stores or _stores(runtime)]
    check_replaced_rows(graph.contract(), listed)
    return tuple(listed)


def faults_of_replaced(runtime: Runtime) -> list[str]:
    """Return every contradiction between the stored layers and the graph."""
    snapshot, graph = runtime.snapshot, condensed_layers(runtime.composition.representation)
    if snapshot.producers == graph.producers and len(snapshot.rows) == len(graph.stored):
        return []
    return [
        f"{len(snapshot.rows)} layers are stored for layers that read {list(snapshot.producers)}, but those of the "
        f"checkpoint read {list(graph.producers)}"
    ]


def _stores(runtime: Runtime) -> list[tuple[int, ...]]:
    return [(layer,) for layer in condensed_layers(runtime.composition.representation).stored]
