"""A method as a composition of axes; what a policy's constructor builds and the engine runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..allocation import UNIFORM, Allocation, BlockDecay, Budget, DepthDecay, FamilyRule
from ..contract import admit_policy
from ..errors import BudgetError, ConfigError, ManifestError, UnsupportedModelError, did_you_mean
from ..evidence import GROUPS, CarriedEvidence, Evidence
from ..geometry import CacheGeometry
from ..representation import ORIGINAL_ROWS, DepthPairs, RowRepresentation
from ..selection import UNITS
from .token_kinds import TokenKinds

__all__ = ["Composition", "Schedule"]

Schedule = Literal["never", "every_step", "when_full", "in_prefill", "end_of_prefill"]

_CHOICES: dict[str, tuple[Any, ...]] = {
    "unit": UNITS,
    "owner": ("kv_head", "query_head"),
    "group": GROUPS,
    "positions": ("original", "cache_local"),
    "on_append": ("recompress", "append"),
    "chunked_prefill": (None, "hold", "bounded"),
    "fallback": (None, "full"),
    "variant": ("paper", "reference"),
    "storage": ("dense", "ragged"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """evidence x allocation x selection x representation x positions x schedule of one cache."""

    policy: str
    schedule: Schedule
    evidence: Evidence
    # None only for a policy that keeps everything.
    budget: Budget | None = None
    # Protected rows: the first tokens, the newest tokens of every selection, and explicit token positions.
    sinks: int = 0
    window_rows: int = 0
    # Share of the budget that protects the newest rows, where the window grows with the budget.
    recent_ratio: float | None = None
    # Share of the budget that is dropped at once when it is exceeded; None drops only what exceeds it.
    drop_ratio: float | None = None
    protect: tuple[int, ...] = ()
    unit: str = "head"
    owner: str = "kv_head"
    group: str = "mean"
    positions: str = "original"
    on_append: str = "recompress"
    chunked_prefill: str | None = None
    fallback: str | None = None
    variant: str = "paper"
    representation: RowRepresentation = ORIGINAL_ROWS
    # How a budget is distributed over layers and heads; anything but uniform needs ragged storage.
    allocation: Allocation = UNIFORM
    storage: str = "dense"
    # How many tokens of a prompt each layer passes on to the next; None passes all on.
    pruning: DepthDecay | None = None
    # How many rows of a block of decode tokens each layer keeps; None appends them all.
    decode_blocks: BlockDecay | None = None
    # How every head gets a policy of its own after a prompt, and the tokens it treats apart.
    families: FamilyRule | None = None
    token_kinds: TokenKinds | None = None
    # The constructor's options as given, for the manifest and YAML.
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Reject options that no run could honour.

        Raises:
            ConfigError: an option is outside its closed set, or a count is negative.
            BudgetError: protected rows leave no row to choose, or a ratio meets bounded chunks.
            ManifestError: the combination is a contract that cannot exist.
        """
        for name, allowed in _CHOICES.items():
            value = getattr(self, name)
            if value not in allowed:
                words = [word for word in allowed if word is not None]
                hint = did_you_mean(str(value), words)
                raise ConfigError(f"{self.policy}: {name}={value!r} is unknown; allowed are {allowed}.{hint}")
        if self.sinks < 0 or self.window_rows < 0 or any(token < 0 for token in self.protect):
            raise ConfigError(f"{self.policy}: sinks, window and protected token positions cannot be negative.")
        if self.owner == "query_head" and self.unit != "head":
            raise ManifestError(
                f"{self.policy}: owner='query_head' gives every query head rows of its own, but unit={self.unit!r} "
                "shares one set. Use unit='head', or owner='kv_head'."
            )
        self._check_representation()
        self._check_pruning()
        self._check_storage()
        if self.budget is not None and self.budget.kind == "rows":
            self.check_rows(int(self.budget.value))
        if self.budget is not None and self.budget.kind == "ratio" and self.chunked_prefill == "bounded":
            raise BudgetError(
                f"{self.policy}: a ratio budget needs the whole prompt, but chunked_prefill='bounded' must hold it "
                "before the prompt has ended. Give rows or bytes, or chunked_prefill='hold'."
            )

    def _check_representation(self) -> None:
        selects = self.budget is not None or self.schedule != "never" or self.pruning is not None
        stored = self.representation.storage
        if self.unit == "pair" and not (self.merges_layers and selects):
            raise ManifestError(
                f"{self.policy}: unit='pair' gives two layers one set of rows, but no layers share rows here. Give "
                "merge_layers='minicache' too, or use another unit."
            )
        if self.merges_layers and selects:
            self._check_merged_selection()
        elif self.representation.replaces_rows and (selects or self.storage != stored):
            raise ManifestError(
                f"{self.policy}: rows stand for others, but owners that keep different positions have none in common, "
                "and what stands for others is not chosen from. Such a policy selects nothing: leave out budget and "
                f"schedule, and use {stored} storage."
            )
        if self.representation.quantizes and self.budget is not None and self.budget.kind == "bytes":
            raise BudgetError(
                f"{self.policy}: how many bytes a quantized row takes depends on how many of its block live, so "
                f"budget={self.budget.declared!r} is no number of rows. Give rows, or a share of the prompt."
            )

    def _check_merged_selection(self) -> None:
        """Refuse to merge the kept rows of layers that do not keep the same tokens, or cannot be read again."""
        if self.storage == "ragged":
            raise ManifestError(
                f"{self.policy}: the layers of a pair share rows only where both keep the same tokens, but heads or "
                "layers keep different numbers of rows here. Leave merge_layers out, or use a policy that gives every "
                "layer as many, such as snapkv."
            )
        if self.unit not in ("token", "pair"):
            raise ManifestError(
                f"{self.policy}: the layers of a pair share rows only where both keep the same tokens, but "
                f"unit={self.unit!r} chooses for each layer by itself. Use unit='pair' or unit='token', or leave "
                "merge_layers out."
            )
        if self.positions != "original":
            raise ManifestError(
                f"{self.policy}: positions={self.positions!r} rotates the keys of the first rows anew at every step, "
                "from copies of each layer's own, and merged layers keep no such copies. Use positions='original', or "
                "leave merge_layers out."
            )
        if self.budget is not None and self.budget.kind == "bytes":
            raise BudgetError(
                f"{self.policy}: how many bytes a merged row takes depends on which rows are kept apart, so "
                f"budget={self.budget.declared!r} is no number of rows. Give rows, or a share of the prompt."
            )

    def _check_storage(self) -> None:
        if self.allocation is not UNIFORM and self.storage != "ragged":
            raise ManifestError(f"{self.policy}: owners of unequal length are stored ragged, not {self.storage}.")
        unheld_scores = self.carries_scores and self.families is None
        by_position = self.is_positional and not self.representation.replaces_rows
        if self.storage == "ragged" and (self.positions != "original" or by_position or unheld_scores):
            raise ManifestError(
                f"{self.policy}: ragged storage holds rows at their original positions, chosen by scores that no row "
                "carries. Use dense storage for position-only policies, cache-local positions and carried scores."
            )
        if self.unit != "head" and (self.allocation.differs_by_head or self.families is not None):
            raise ManifestError(
                f"{self.policy}: unit={self.unit!r} shares one set of rows among heads, but what they keep differs by "
                "head. Use unit='head'."
            )
        if self.unit == "token" and self.storage == "ragged":
            raise ManifestError(
                f"{self.policy}: unit='token' keeps one set of rows for the whole cache, but the budget differs by "
                "layer. Use unit='layer' or unit='head'."
            )

    def _check_pruning(self) -> None:
        if self.pruning is None:
            return
        if self.unit != "layer":
            raise ManifestError(
                f"{self.policy}: a token that is dropped between layers is dropped for all heads of a layer, but "
                f"unit={self.unit!r} gives sets of another kind. Use unit='layer'."
            )
        if self.chunked_prefill == "hold":
            raise ManifestError(
                f"{self.policy}: tokens are dropped while a prompt runs, by its last queries, but "
                "chunked_prefill='hold' feeds those after the other tokens have passed every layer. Feed the prompt in "
                "one forward, or use chunked_prefill='bounded', which prunes every chunk on its own."
            )

    @property
    def minimum_rows(self) -> int:
        """Fewest rows that leave one row to choose after the protected ones."""
        return self.window_rows + self.sinks + len(set(self.protect) - set(range(self.sinks))) + 1

    @property
    def pinned_tokens(self) -> tuple[int, ...]:
        """Token positions that are protected for ever, ascending."""
        return tuple(sorted(set(range(self.sinks)) | set(self.protect)))

    @property
    def is_positional(self) -> bool:
        """Whether rows are chosen by position alone, so that one set serves every layer and head."""
        return not self.evidence.differs_by_layer

    @property
    def heads_share(self) -> bool:
        """Whether the heads of a layer share one set of rows."""
        return self.unit in ("layer", "token")

    @property
    def decides_after_all_layers(self) -> bool:
        """Whether a selection must wait for the last layer."""
        return self.unit == "token" and not self.is_positional

    @property
    def carries_scores(self) -> bool:
        """Whether rows carry states that every query updates."""
        return isinstance(self.evidence, CarriedEvidence)

    @property
    def before_taking_back(self) -> str:
        """What a caller does before tokens that may be taken back."""
        if self.decode_blocks is not None:
            return "Work on a copy (cache.branch() or cache.fork()), or make the cache with decode_block=None."
        return "Call cache.activate_past_recording() before the forwards that may be taken back."

    @property
    def bounds_every_step(self) -> bool:
        """Whether no publication may leave more rows than the budget."""
        return self.schedule in ("every_step", "when_full")

    @property
    def quantizes(self) -> bool:
        """Whether older rows are coded in few bits."""
        return self.representation.quantizes

    @property
    def merges_layers(self) -> bool:
        """Whether neighbouring layers share stored rows."""
        return bool(self.pairs)

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The layers that share stored rows, two by two; none where each has its own."""
        return self.representation.pairs if isinstance(self.representation, DepthPairs) else ()

    def stored_heads(self, geometry: CacheGeometry) -> int:
        """Return the heads of one layer that own rows: KV heads, or query heads for owner='query_head'."""
        return geometry.num_query_heads if self.owner == "query_head" else geometry.num_kv_heads

    def window_for(self, budget_rows: int) -> int:
        """Return how many of the newest rows a selection protects under a budget."""
        return max(self.window_rows, int((self.recent_ratio or 0.0) * budget_rows))

    def kept_rows(self, count: int, budget_rows: int) -> int:
        """Return how many of `count` candidate rows stay under a budget."""
        if count <= budget_rows:
            return count
        at_once = int((self.drop_ratio or 0.0) * budget_rows)
        return count - max(at_once, count - budget_rows)

    @property
    def changes_forward(self) -> bool:
        """Whether a prompt's forward is another than the model's own, so that none of that can be reused."""
        return self.pruning is not None or not self.representation.leaves_forward

    @property
    def moves_keys(self) -> bool:
        """Whether it must be known how the model rotates keys."""
        return self.positions == "cache_local" or self.representation.unrotates_keys

    def check_model(self, geometry: CacheGeometry, config: object) -> None:
        """Reject a model that the method cannot act on.

        Raises:
            CheckpointAdmissionError: the checkpoint was trained for other rows, or not for these.
            UnsupportedModelError: tokens would be dropped between layers, some of which count every token.
        """
        admit_policy(self.policy, self.representation.kind, config, self.representation.training)
        if self.pruning is not None and geometry.foreign_layers:
            raise UnsupportedModelError(
                f"{self.policy} drops tokens between layers, but this {geometry.model_type!r} model has layers of "
                "other kinds (sliding, linear attention), which take in every token fed. Use a policy that compresses "
                "at the end of a prompt, such as snapkv."
            )

    def check_rows(self, rows: int) -> None:
        """Reject a row budget that protected rows fill.

        Raises:
            BudgetError: nothing is left to choose.
        """
        pinned = len(self.pinned_tokens)
        if self.carries_scores and self.window_for(rows) + pinned + int((self.drop_ratio or 0.0) * rows) > rows:
            raise BudgetError(
                f"{self.policy}: under a budget of {rows} rows the newest {self.window_for(rows)} and {pinned} "
                f"protected positions stay, and {int((self.drop_ratio or 0.0) * rows)} rows are dropped at once: more "
                "than there are. Give a larger budget, protect fewer rows, or drop fewer at once."
            )
        if rows < self.minimum_rows:
            raise BudgetError(
                f"{self.policy}: a budget of {rows} rows does not leave a row to choose: the window takes "
                f"{self.window_rows} and protected positions take {self.minimum_rows - 1 - self.window_rows}. "
                f"Give a budget of at least {self.minimum_rows} rows, or protect fewer."
            )
