"""One published selection as an immutable snapshot, and the checks it must pass (KVPolicyState, 0x01A)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ..errors import ConfigError, IntegrityError, ManifestError
from ._checks import check_choice, check_int, check_text
from .generations import Generations
from .position_sets import LazyPositions, NestedPositions, PositionSets, omitted_intervals
from .selection_contract import DECISION_PHASES

__all__ = ["KVPolicyState"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPolicyState:
    """What is visible after one publication. An update makes a successor; nothing here is edited.

    `source_committed_frontier` counts the committed positions of the source. In a padded batch
    `row_frontiers` gives every batch row's own count of real tokens; None means one batch row with the
    source's frontier. `protected_original_positions` has one ordered tuple per batch row. `positions_source`
    is called once, when `selected_original_positions` is first read, and may raise StaleGenerationError; it is
    None, and `replacement_object_ids` name the stores, where rows are replacements.
    Equality compares the identity (everything but the positions), so it reads no store.
    Raises ConfigError for malformed fields and IntegrityError for a parent that is not older.
    """

    request_id: str
    request_generation: int
    cache_generation: int
    policy_manifest_sha256: str
    policy_generation: int
    state_generation: int
    parent_state_generation: int | None
    source_committed_frontier: int
    source_position_origin: int = 0
    row_frontiers: Sequence[int] | None = None
    decision_phase: str
    decision_epoch: int
    evidence_receipt_id: str | None = None
    positions_source: Callable[[], NestedPositions] | None = field(repr=False, compare=False)
    protected_original_positions: Sequence[Sequence[int]] = ((),)
    replacement_object_ids: Sequence[str] = ()

    def __post_init__(self) -> None:
        check_text("request_id", self.request_id)
        check_choice("decision_phase", self.decision_phase, DECISION_PHASES)
        for name in (
            "request_generation",
            "cache_generation",
            "policy_generation",
            "state_generation",
            "source_committed_frontier",
            "source_position_origin",
            "decision_epoch",
        ):
            check_int(name, getattr(self, name))
        parent = self.parent_state_generation
        if parent is not None and parent >= self.state_generation:
            raise IntegrityError(
                f"State generation {self.state_generation} names {parent} as its parent, but a parent is "
                "always older. Issue successor generations from the cache's clock."
            )
        if self.positions_source is not None:
            object.__setattr__(self, "positions_source", LazyPositions.wrap(self.positions_source))
        object.__setattr__(
            self,
            "protected_original_positions",
            tuple(tuple(row) for row in self.protected_original_positions),
        )
        object.__setattr__(self, "replacement_object_ids", tuple(self.replacement_object_ids))
        if (self.positions_source is None) != bool(self.replacement_object_ids):
            raise ConfigError(
                "A state either selects original positions or names the stores of replaced rows in "
                "replacement_object_ids; give positions_source or the ids, not both."
            )
        if self.row_frontiers is not None:
            object.__setattr__(self, "row_frontiers", tuple(self.row_frontiers))

    @property
    def selected_original_positions(self) -> PositionSets | None:
        """Ordered token positions [layer][batch row * heads + head][rank], read once; None where rows are replaced."""
        source = self.positions_source
        if source is None:
            return None
        return source() if isinstance(source, LazyPositions) else LazyPositions(source)()

    @property
    def frontiers(self) -> tuple[int, ...]:
        """The committed token count of every batch row."""
        return (self.source_committed_frontier,) if self.row_frontiers is None else tuple(self.row_frontiers)

    @property
    def generations(self) -> Generations:
        """The four generation numbers of this state."""
        return Generations(
            request=self.request_generation,
            cache=self.cache_generation,
            policy=self.policy_generation,
            state=self.state_generation,
        )

    @property
    def omitted_interval_summary(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Per batch row, the half-open intervals of committed positions that no owner of any layer holds.

        Raises ManifestError where rows are replacements: they omit no position and hold none as it was.
        """
        rows = self.frontiers
        layers = self.selected_original_positions
        if layers is None:
            raise ManifestError(
                "Rows of this state are replacements, so no position is held or omitted. Read the receipt's replaced "
                "rows, or cache.source_spans(layer)."
            )
        origin = self.source_position_origin
        summary = []
        for b, frontier in enumerate(rows):
            owners = [
                owner
                for layer in layers
                for owner in layer[b * len(layer) // len(rows) : (b + 1) * len(layer) // len(rows)]
            ]
            summary.append(omitted_intervals(owners, origin=origin, stop=origin + frontier))
        return tuple(summary)
