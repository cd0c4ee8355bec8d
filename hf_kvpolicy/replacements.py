"""The records of rows that replace others, by kind: their contract, what a receipt lists, what may contradict it.

Each kind has a module of its own, which is imported where a cache has such rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .contract import CONDENSED, DEPTH_PAIRS, SEGMENTS, ReplacedRows, RepresentationContract, Span
from .engine import Runtime, Snapshot
from .errors import IntegrityError
from .geometry import CacheGeometry
from .representation import RowRepresentation

__all__ = ["contract_of", "faults_of_replaced", "own_spans", "replaced_rows_of"]


class _Records(Protocol):
    """What a kind's module has."""

    def contract_of(
        self, representation: RowRepresentation, geometry: CacheGeometry, scalar: str
    ) -> RepresentationContract: ...

    def replaced_rows_of(self, runtime: Runtime) -> Sequence[ReplacedRows]: ...

    def faults_of_replaced(self, runtime: Runtime) -> list[str]: ...


def contract_of(representation: RowRepresentation, geometry: CacheGeometry, scalar: str) -> RepresentationContract:
    """Return what rows that replace others mean to a reader; `scalar` is the dtype of rows."""
    return _records(representation).contract_of(representation, geometry, scalar)


def replaced_rows_of(runtime: Runtime) -> tuple[ReplacedRows, ...]:
    """Return what every published row stands for, store by store.

    Raises:
        SelectionError: the rows are not those that the cache's contract names.
    """
    return tuple(_records(runtime.composition.representation).replaced_rows_of(runtime))


def faults_of_replaced(runtime: Runtime) -> list[str]:
    """Return every contradiction between what replaces rows and what is fed."""
    return _records(runtime.composition.representation).faults_of_replaced(runtime)


def own_spans(snapshot: Snapshot, heads: int) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of one store whose rows stand for their own tokens, [owner][rank]."""
    if not snapshot.buffers:
        return ()
    table = snapshot.full_map(0)
    found = zip(table.tokens_BMW[:, 0], table.live_BMW[:, 0], strict=True)
    own = [tuple((token, token) for token in tokens[live].tolist()) for tokens, live in found]
    return tuple(spans for spans in own for _ in range(heads))


def _records(representation: RowRepresentation) -> _Records:
    kind = representation.kind
    if kind == DEPTH_PAIRS:
        from . import replaced_pairs

        return replaced_pairs
    if kind == SEGMENTS:
        from . import replaced_segments

        return replaced_segments
    if kind == CONDENSED:
        from . import replaced_layers

        return replaced_layers
    raise IntegrityError(f"Rows of the kind {kind!r} replace others, but no module knows what their records say.")
