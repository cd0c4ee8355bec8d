"""What is selected, for whom, when, from which evidence and within which budget (0x01A)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import ManifestError
from ._checks import check_choice, check_int, check_text
from .canonical import FrozenMapping

__all__ = [
    "BUDGET_SCOPES",
    "BUDGET_UNITS",
    "CADENCES",
    "DECISION_PHASES",
    "DUPLICATE_RULES",
    "GROUPS",
    "ORDERINGS",
    "OWNERS",
    "PROTECTION_SCOPES",
    "SPECIFICATION_UNITS",
    "UNITS",
    "BudgetContract",
    "ProtectedRule",
    "SelectionContract",
]

UNITS = ("head", "pair", "layer", "token")
OWNERS = ("kv_head", "query_head")
GROUPS = ("mean", "max", "sum")
DECISION_PHASES = ("none", "prefill", "decode", "both")
BUDGET_UNITS = ("none", "rows", "ratio", "bytes")
BUDGET_SCOPES = ("owner", "layer", "cache")
PROTECTION_SCOPES = ("every_owner", "some_owner")
CADENCES = ("static", "in_prefill", "end_of_prefill", "when_full", "periodic", "every_step", "learned")
ORDERINGS = ("position", "score", "unordered")
DUPLICATE_RULES = ("reject",)

SPECIFICATION_UNITS = {
    "per_layer_kv_head": "head",
    "per_layer_query_head": "head",
    "layer_head_token": "head",
    "layer_token": "layer",
}
"""The visibility contract's own words for a selection unit, and the unit of this library each one means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetContract:
    """The declared budget and the rows it may leave.

    `declared` is the value as the user gave it (rows, ratio or "64MiB"). `max_rows` bounds what one selection
    leaves in one `scope` of one batch row: an owner (a KV head of a layer), a layer, or the whole cache; None
    when it is only known later or never bounded.
    """

    declared: int | float | str | None = None
    unit: str = "none"
    scope: str = "owner"
    max_rows: int | None = None

    def __post_init__(self) -> None:
        check_choice("budget.unit", self.unit, BUDGET_UNITS, error=ManifestError)
        check_choice("budget.scope", self.scope, BUDGET_SCOPES, error=ManifestError)
        if (self.declared is None) != (self.unit == "none"):
            raise ManifestError(
                f"budget.declared is {self.declared!r} while budget.unit is {self.unit!r}, but a declared "
                "value needs a unit and unit 'none' means no value. Give both or neither."
            )
        if self.max_rows is not None:
            check_int("budget.max_rows", self.max_rows, minimum=1, error=ManifestError)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtectedRule:
    """Positions no selection may drop: the first `sink_rows`, the last `recent_rows`, and `positions`.

    `scope` says whether every owner must hold them or at least one owner of the batch row.
    """

    sink_rows: int = 0
    recent_rows: int = 0
    positions: Sequence[int] = ()
    scope: str = "every_owner"

    def __post_init__(self) -> None:
        check_int("protected.sink_rows", self.sink_rows, error=ManifestError)
        check_int("protected.recent_rows", self.recent_rows, error=ManifestError)
        check_choice("protected.scope", self.scope, PROTECTION_SCOPES, error=ManifestError)
        object.__setattr__(self, "positions", tuple(self.positions))
        for position in self.positions:
            check_int("protected.positions", position, error=ManifestError)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectionContract:
    """The immutable meaning of a policy's selections.

    `options` holds every constructor option as JSON values. `unit` is one of `UNITS`, or a word of
    `SPECIFICATION_UNITS`, which is normalised so that one meaning has one identity. `owner` names whose rows
    are counted and `group` how query-head scores reduce to it. `evidence_family` is a registered family's
    name.
    """

    policy: str
    options: Mapping[str, object] = field(default_factory=dict)
    unit: str = "head"
    owner: str = "kv_head"
    group: str = "mean"
    decision_phase: str
    update_cadence: str
    evidence_family: str
    budget: BudgetContract = field(default_factory=BudgetContract, metadata={"record": BudgetContract})
    protected: ProtectedRule = field(default_factory=ProtectedRule, metadata={"record": ProtectedRule})
    ordering: str = "position"
    duplicate_rule: str = "reject"

    def __post_init__(self) -> None:
        check_text("selection.policy", self.policy, error=ManifestError)
        check_text("selection.evidence_family", self.evidence_family, error=ManifestError)
        if not isinstance(self.options, Mapping):
            raise ManifestError(
                f"selection.options must map option names to JSON values, but {type(self.options).__name__} "
                "was given. Pass all constructor options as a mapping."
            )
        object.__setattr__(self, "options", FrozenMapping(self.options))
        self._normalise_unit()
        for name, allowed in (
            ("unit", UNITS),
            ("owner", OWNERS),
            ("group", GROUPS),
            ("decision_phase", DECISION_PHASES),
            ("update_cadence", CADENCES),
            ("ordering", ORDERINGS),
            ("duplicate_rule", DUPLICATE_RULES),
        ):
            check_choice(f"selection.{name}", getattr(self, name), allowed, error=ManifestError)

    def _normalise_unit(self) -> None:
        word = self.unit
        if word not in SPECIFICATION_UNITS:
            return
        named_owner = {"per_layer_kv_head": "kv_head", "per_layer_query_head": "query_head"}.get(word, self.owner)
        if named_owner != self.owner:
            raise ManifestError(
                f"selection.unit {word!r} selects for each {named_owner}, but selection.owner is "
                f"{self.owner!r}. Set owner={named_owner!r}, or use unit='head'."
            )
        object.__setattr__(self, "unit", SPECIFICATION_UNITS[word])

    @property
    def specification_unit(self) -> str:
        """The visibility contract's word for this unit and owner, e.g. 'per_layer_kv_head'."""
        if self.unit == "head":
            return f"per_layer_{self.owner}"
        return {"pair": "per_layer_pair_kv_head", "layer": "layer_token", "token": "token"}[self.unit]
