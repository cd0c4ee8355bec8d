"""The receipt of one publication: a digest that any drift of a selection changes (0x0EE)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ._checks import check_int, check_text
from .canonical import sha256_of
from .generations import Generations
from .position_sets import LazyPositions, NestedPositions, PositionSets

__all__ = ["PackedKVViewReceipt"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedKVViewReceipt:
    """What was published, in a form that detects drift; no substitute for the position map.

    `positions_source` is called once, when positions or digest are first read, and may raise
    StaleGenerationError; pass the state's own source to read the store once for both. Receipts are equal when
    their digests are.
    Raises ConfigError for malformed fields.
    """

    request_id: str
    parent: Generations
    successor: Generations
    policy_manifest_sha256: str
    frontier: int
    positions_source: Callable[[], NestedPositions] = field(repr=False)
    representation_schema: str = "original_rows"
    payload_bytes: int = 0
    _digest: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        check_text("request_id", self.request_id)
        check_text("policy_manifest_sha256", self.policy_manifest_sha256)
        check_text("representation_schema", self.representation_schema)
        check_int("frontier", self.frontier)
        check_int("payload_bytes", self.payload_bytes)
        object.__setattr__(self, "positions_source", LazyPositions.wrap(self.positions_source))

    @property
    def selected_original_positions(self) -> PositionSets:
        """Ordered token positions [layer][owner][rank] that were published."""
        source = self.positions_source
        return source() if isinstance(source, LazyPositions) else LazyPositions(source)()

    @property
    def rows_per_owner(self) -> tuple[tuple[int, ...], ...]:
        """Row counts [layer][owner]."""
        return tuple(tuple(len(owner) for owner in layer) for layer in self.selected_original_positions)

    @property
    def digest(self) -> str:
        """SHA-256 over request and successor generations, manifest digest and ordered position sets."""
        if self._digest is None:
            identity = {
                "request_generation": self.successor.request,
                "successor_cache_generation": self.successor.cache,
                "successor_policy_generation": self.successor.policy,
                "successor_state_generation": self.successor.state,
                "policy_manifest_sha256": self.policy_manifest_sha256,
                "selected_original_positions": self.selected_original_positions,
            }
            object.__setattr__(self, "_digest", sha256_of(identity))
        return self._digest or ""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PackedKVViewReceipt):
            return NotImplemented
        return self is other or self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
