"""The records of a cache whose rows stand for others: its contract, what a receipt lists, what may contradict them.

Each representation has a module of its own for them, which is imported where a cache has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .contract import CONDENSED, DEPTH_PAIRS, ReplacedRows, RepresentationContract, Span
from .engine import Runtime, Snapshot
from .errors import IntegrityError
from .geometry import CacheGeometry
from .representation import RowRepresentation

__all__ = ["contract_of", "own_spans", "replaced_rows_of", "store_faults", "tokens_by_slot"]


class _Records(Protocol):
    def contract_of(
        self, representation: RowRepresentation, geometry: CacheGeometry, scalar: str
    ) -> RepresentationContract: ...

    def replaced_rows_of(self, runtime: Runtime) -> Sequence[ReplacedRows]: ...

    def store_faults(self, runtime: Runtime) -> list[str]: ...


def contract_of(representation: RowRepresentation, geometry: CacheGeometry, scalar: str) -> RepresentationContract:
    """Return what the rows mean to a reader; `scalar` is their dtype."""
    return _records(representation).contract_of(representation, geometry, scalar)


def replaced_rows_of(runtime: Runtime) -> tuple[ReplacedRows, ...]:
    """Return what every published row stands for, store by store.

    Raises:
        SelectionError: the rows are not those that the cache's contract names.
    """
    return tuple(_records(runtime.composition.representation).replaced_rows_of(runtime))


def store_faults(runtime: Runtime) -> list[str]:
    """Return every contradiction between the stores and what was fed."""
    return _records(runtime.composition.representation).store_faults(runtime)


def own_spans(snapshot: Snapshot, heads: int) -> tuple[tuple[Span, ...], ...]:
    """Return the spans of one store whose rows stand for their own tokens, [owner][rank]."""
    tokens = tokens_by_slot(snapshot)
    return tuple(tuple((token, token) for token in row.values()) for row in tokens for _ in range(heads))


def tokens_by_slot(snapshot: Snapshot) -> list[dict[int, int]]:
    """Return slot -> token position of each batch row's live rows, ascending."""
    if not snapshot.buffers:
        return []
    table = snapshot.full_map(0)
    rows = zip(table.tokens_BMW[:, 0].tolist(), table.live_BMW[:, 0].tolist(), strict=True)
    return [
        {slot: token for slot, (token, live) in enumerate(zip(tokens, lives, strict=True)) if live}
        for tokens, lives in rows
    ]


def _records(representation: RowRepresentation) -> _Records:
    if representation.name == DEPTH_PAIRS:
        from . import pair_records

        return pair_records
    if representation.name == CONDENSED:
        from . import condensed_records

        return condensed_records
    raise IntegrityError(f"{representation.name} replaces rows, but no module knows what its records say.")
