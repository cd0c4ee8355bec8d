"""The receipt of one publication: a digest that any drift of a selection changes (0x0EE)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError
from ._checks import check_int, check_text
from .canonical import JsonValue, sha256_of
from .generations import Generations
from .position_sets import LazyPositions, NestedPositions, PositionSets
from .replaced_rows import ReplacedRows

__all__ = ["PackedKVViewReceipt"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedKVViewReceipt:
    """What was published, in a form that detects drift; no substitute for the position map.

    `positions_source` is called once, when positions or digest are first read, and may raise
    StaleGenerationError; pass the state's own source to read the store once for both. Receipts are equal when
    their digests are.

    A receipt of replaced rows has no positions: `replaced_source` lists what every stored row stands for, and
    `consumer_schema` who may read it. It is never the receipt of an exact prefix.
    Raises ConfigError for malformed fields, and for rows that are both original and replaced.
    """

    request_id: str
    parent: Generations
    successor: Generations
    policy_manifest_sha256: str
    frontier: int
    positions_source: Callable[[], NestedPositions] | None = field(repr=False)
    representation_schema: str = "original_rows"
    payload_bytes: int = 0
    consumer_schema: str | None = None
    replaced_source: Callable[[], Sequence[ReplacedRows]] | None = field(default=None, repr=False)
    _replaced: tuple[ReplacedRows, ...] | None = field(default=None, init=False, repr=False)
    _digest: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_text("request_id", self.request_id)
        check_text("policy_manifest_sha256", self.policy_manifest_sha256)
        check_text("representation_schema", self.representation_schema)
        check_int("frontier", self.frontier)
        check_int("payload_bytes", self.payload_bytes)
        if self.positions_source is not None:
            object.__setattr__(self, "positions_source", LazyPositions.wrap(self.positions_source))
        replaced = self.replaced_source is not None
        if (
            replaced != (self.positions_source is None)
            or replaced != (self.representation_schema != "original_rows")
            or replaced != (self.consumer_schema is not None)
        ):
            raise ConfigError(
                f"A receipt with the representation {self.representation_schema!r} lists either positions of original "
                "rows, or replaced rows with the consumer that may read them. Give the one or the other."
            )

    @property
    def selected_original_positions(self) -> PositionSets | None:
        """Ordered token positions [layer][owner][rank] that were published; None where rows are replaced."""
        source = self.positions_source
        if source is None:
            return None
        return source() if isinstance(source, LazyPositions) else LazyPositions(source)()

    @property
    def replaced_rows(self) -> tuple[ReplacedRows, ...] | None:
        """What every stored row stands for, store by store, read once; None where rows are original."""
        if self.replaced_source is not None and self._replaced is None:
            object.__setattr__(self, "_replaced", tuple(self.replaced_source()))
        return self._replaced

    @property
    def rows_per_owner(self) -> tuple[tuple[int, ...], ...]:
        """Row counts [layer][owner]; [store][owner] where rows are replaced."""
        if self.replaced_rows is not None:
            return tuple(tuple(len(owner) for owner in store.spans) for store in self.replaced_rows)
        return tuple(tuple(len(owner) for owner in layer) for layer in self.selected_original_positions or ())

    @property
    def digest(self) -> str:
        """SHA-256 over request and successor generations, manifest digest and ordered position sets or spans."""
        if self._digest is None:
            identity: dict[str, object] = {
                "request_generation": self.successor.request,
                "successor_cache_generation": self.successor.cache,
                "successor_policy_generation": self.successor.policy,
                "successor_state_generation": self.successor.state,
                "policy_manifest_sha256": self.policy_manifest_sha256,
                **self._rows(),
            }
            object.__setattr__(self, "_digest", sha256_of(identity))
        return self._digest or ""

    def _rows(self) -> dict[str, object]:
        if self.replaced_rows is None:
            return {"selected_original_positions": self.selected_original_positions}
        listed: list[JsonValue] = [store.to_json() for store in self.replaced_rows]
        return {"consumer_schema": self.consumer_schema, "replaced_rows": listed}

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedKVViewReceipt):
            return NotImplemented
        return self is other or self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
