"""HeadKV: SnapKV's rows, and for each (layer, head) as many as it earned in a retrieval test of its checkpoint.

Fu et al., "Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning"
(arXiv 2410.19258); section 0x08G. Of b rows beside the window, in the mean over L H heads, b / beta go into a pool that
is shared by importance: b_h = (b - b / beta) + S_h (b / beta) L H with sum(S) = 1. Rows are chosen as in `snapkv`.

A larger beta means a smaller pool: so say the equation and the released code; its README says the opposite. The
default of 1.5 is that of the released command line (other implementations use 1.01, which pools almost everything).
Deviations: whole rows by largest remainder, so the total is exactly the budget's, and what a head cannot fill (the
prompt is shorter than its share) goes to the others. Rows belong to KV heads: a KV head's importance is the sum over
its query heads. `variant="reference"` divides and rounds head by head as the released code does and drops the surplus.
Not supported: `unit="layer"` and `unit="token"` (budgets differ by head), rows per query head, the released code's
power of the importances (its default of 1 changes nothing).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch

from ...allocation import HeadTableAllocation, head_targets, query_to_kv_importance
from ...contract import sha256_of
from ...errors import ConfigError, did_you_mean
from ...evidence import Pooling, WindowVotes
from ...geometry import CacheGeometry
from ...profiles import Profile, load_profile, shipped_profile
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, compose

__all__ = ["HeadKVCache", "ProfileLike"]

ProfileLike: TypeAlias = str | os.PathLike[str] | Sequence[Sequence[float]]

_WORDS = ("shipped", "uniform")


@register_policy("headkv")
class HeadKVCache(PolicyCache):
    """Compresses each prompt segment at its end; every (layer, head) keeps a share of its own, stored ragged."""

    units = ("head",)

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        window: int = 8,
        beta: float = 1.5,
        profile: ProfileLike = "shipped",
        kernel_size: int = 7,
        pooling: Pooling = "max",
        group: str = "mean",
        unit: str = "head",
        protect: Iterable[int] | None = None,
        on_append: str = "recompress",
        chunked_prefill: str | None = None,
        variant: str = "paper",
        fallback: str | None = None,
        quantize: str | None = None,
        block_rows: int | None = None,
        merge_layers: MergeLayers = None,
    ) -> None:
        """Make an empty cache.

        Args:
            model_or_config: a model (it is attached) or a config, whose profile meets the weights at the first forward.
            budget: rows per KV head in the mean, share of the prompt, or bytes; the window is inside it.
            window: last prompt queries that vote, and last rows that always stay.
            beta: at least 1; 1/beta of the rows beside the window are shared by importance, the rest is equal.
            profile: "shipped" (one that comes with the library and was measured on these weights), "uniform", the path
                of a file that `kvpolicy calibrate headkv` wrote, or importances as one list per layer, by KV head or by
                query head.
            kernel_size: odd width of the pooling of votes; 1 turns it off.
            pooling: "max" or "avg".
            group: how votes of the query heads of one KV head are reduced: "mean", "max" or "sum".
            unit: "head"; nothing else can have budgets per head.
            protect: token positions that always stay, inside the budget.
            on_append: what a later prompt segment does: "recompress" everything to the budget, or "append".
            chunked_prefill: "hold" or "bounded" for a prompt fed in chunks.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, up to three
                times as many, are not quantized.
            merge_layers: None; heads or layers that hold different numbers of rows share none.

        Raises:
            BudgetError: the budget is not larger than window and protected rows.
            CheckpointAdmissionError: the profile was measured on another checkpoint, or none is shipped for this one.
            ConfigError: an option is outside its range, or the profile cannot be read.
            IntegrityError: the profile was altered.
            ManifestError: unit is not "head".
        """
        _check_beta(beta)
        self._profile = _read(profile)
        common = {
            "budget": budget,
            "unit": unit,
            "group": group,
            "protect": protect,
            "on_append": on_append,
            "chunked_prefill": chunked_prefill,
            "variant": variant,
            "fallback": fallback,
            "quantize": quantize,
            "block_rows": block_rows,
            "merge_layers": merge_layers,
        }
        own = {
            "window": window,
            "beta": beta,
            "profile": _recorded(self._profile),
            "kernel_size": kernel_size,
            "pooling": pooling,
        }
        composition = compose(
            "headkv",
            common,
            own,
            model=model_or_config,
            schedule="end_of_prefill",
            evidence=WindowVotes(window_queries=window, kernel_size=kernel_size, pooling=pooling),
            window_rows=window,
            allocation=HeadTableAllocation(
                importance=(), beta=beta, reference=variant == "reference", source="known with the model"
            ),
            storage="ragged",
        )
        super().__init__(model_or_config, composition)
        if self._decoder is None:
            self._take_table(None)

    def _bind(self, decoder: torch.nn.Module) -> None:
        self._take_table(decoder)
        super()._bind(decoder)

    def _take_table(self, decoder: torch.nn.Module | None) -> None:
        """Put the importances into the composition; without a model, what does not depend on its weights."""
        found = self._profile
        if found == "shipped":
            if decoder is None:
                return
            found = shipped_profile("headkv", decoder)
        elif isinstance(found, Profile):
            found.check_geometry(self.geometry)
            if decoder is not None:
                found.admit(decoder)
        table = _table(found, self.geometry)
        importance = tuple(value for layer in table for value in layer)
        composition = self._runtime.composition
        allocation = composition.allocation
        assert isinstance(allocation, HeadTableAllocation), "composed above"
        head_targets(importance, 1, allocation.beta)  # refuses numbers that no rows can follow
        source = "uniform" if found == "uniform" else sha256_of(table)
        allocation = replace(allocation, importance=importance, source=source)
        self._runtime.composition = replace(composition, allocation=allocation)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 2), "window": 1, "profile": "uniform"}


def _check_beta(beta: float) -> None:
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 1 <= beta < float("inf"):
        raise ConfigError(f"headkv: 1/beta of the rows go to heads by importance, so beta is at least 1; got {beta!r}.")


def _read(profile: ProfileLike) -> Profile | str | list[list[float]]:
    """Return a word, a verified profile, or importances as given."""
    if isinstance(profile, str) and profile in _WORDS:
        return profile
    if isinstance(profile, str | os.PathLike):
        try:
            found = load_profile(profile)
        except ConfigError as error:
            hint = did_you_mean(str(profile), _WORDS)
            raise ConfigError(f"headkv: profile is a file, a table, or one of {_WORDS}.{hint} {error}") from error
        if found.kind != "headkv":
            raise ConfigError(
                f"headkv: {str(profile)!r} is a {found.kind} profile, which does not say how important heads are. "
                "Give one that `kvpolicy calibrate headkv` wrote."
            )
        return found
    try:
        return [[float(value) for value in layer] for layer in profile]
    except (TypeError, ValueError):
        raise ConfigError(
            f"headkv: profile is a file, one of {_WORDS}, or a list of importances per layer; got {profile!r}."
        ) from None


def _recorded(profile: Profile | str | list[list[float]]) -> Any:
    """Return what rebuilds the cache: a saved cache must not depend on a file that lies elsewhere."""
    return [list(layer) for layer in profile.kv_heads_LH] if isinstance(profile, Profile) else profile


def _table(profile: Profile | str | list[list[float]], geometry: CacheGeometry) -> list[list[float]]:
    """Return importances [L][H] by KV head.

    Raises:
        ConfigError: given importances do not fit the model.
    """
    layers, heads, queries = geometry.num_layers, geometry.num_kv_heads, geometry.num_query_heads
    if isinstance(profile, Profile):
        return [list(layer) for layer in profile.kv_heads_LH]
    if isinstance(profile, str):
        return [[1.0] * heads] * layers
    widths = {len(layer) for layer in profile}
    if len(profile) != layers or widths not in ({heads}, {queries}):
        raise ConfigError(
            f"headkv: the profile lists {len(profile)} layers of {sorted(widths)} heads, but the model has {layers} "
            f"layers of {heads} KV heads ({queries} query heads). Give one importance for each."
        )
    if widths == {heads}:
        return profile
    return [[float(value) for value in query_to_kv_importance(layer, geometry.group_size)] for layer in profile]
