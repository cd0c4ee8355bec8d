"""Which layers of a model are merged, and how: `MiniCache` itself, and `merge_layers` of a policy that selects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ..attach import model_and_config
from ..errors import ConfigError, UnsupportedModelError, did_you_mean
from ..geometry import CacheGeometry
from ..representation import DepthPairs, layer_pairs
from .options import check_ratio

if TYPE_CHECKING:
    from .base import ModelOrConfig

__all__ = ["MergeLayers", "merged_options", "merged_pairs", "merged_rows"]

MergeLayers: TypeAlias = str | Mapping[str, Any] | None

_METHOD = "minicache"
_DEFAULTS: Mapping[str, Any] = {"start_layer": None, "interpolation": 0.6, "retention": 0.05}


def merged_rows(policy: str, merge_layers: MergeLayers, model_or_config: ModelOrConfig) -> DepthPairs:
    """Return what a stored row is where a policy's kept rows are merged: `merge_layers` is not None.

    Raises:
        ConfigError: it is neither "minicache" nor a mapping of that method's options.
        UnsupportedModelError: no two layers can be merged.
    """
    given = {} if merge_layers == _METHOD else merge_layers
    if not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given):
        hint = did_you_mean(str(merge_layers), [_METHOD])
        raise ConfigError(
            f"{policy}: merge_layers={merge_layers!r} is unknown; allowed are None, {_METHOD!r}, or a mapping with "
            f"options of it ({', '.join(_DEFAULTS)}).{hint}"
        )
    for key in given:
        if key not in _DEFAULTS:
            hint = did_you_mean(key, list(_DEFAULTS))
            raise ConfigError(f"{policy}: merge_layers has no option {key!r}; it has {', '.join(_DEFAULTS)}.{hint}")
    return merged_pairs(policy, model_or_config, **{**_DEFAULTS, **given})


def merged_options(rule: DepthPairs) -> dict[str, Any]:
    """Return the options under which layers are merged so, the same for all spellings of them."""
    return {"start_layer": rule.pairs[0][0], "interpolation": rule.interpolation, "retention": rule.retention}


def merged_pairs(
    policy: str, model_or_config: ModelOrConfig, *, start_layer: int | None, interpolation: float, retention: float
) -> DepthPairs:
    """Return which layers of a model are merged two by two, and how.

    Raises:
        ConfigError: an option is outside its range.
        UnsupportedModelError: no two layers of one geometry follow one another from `start_layer` on.
    """
    check_ratio(policy, "interpolation", interpolation)
    check_ratio(policy, "retention", retention)
    geometry = CacheGeometry.from_config(model_and_config(model_or_config)[1])
    start = geometry.num_layers // 2 if start_layer is None else start_layer
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start < geometry.num_layers:
        raise ConfigError(
            f"{policy}: start_layer={start_layer} is no layer of this model, whose layers are 0 to "
            f"{geometry.num_layers - 1}. Give one of them as a whole number, or None for the middle."
        )
    pairs = layer_pairs(start, geometry.window_tokens)
    if not pairs:
        raise UnsupportedModelError(
            f"{policy} is to merge layers two by two, but from layer {start} on this model of {geometry.num_layers} "
            "layers has no two neighbours of one geometry. Start at a lower layer, or use a policy that keeps fewer "
            "rows, such as snapkv, without merging."
        )
    return DepthPairs(
        name="merged_depth_pairs",
        replaces_rows=True,
        pairs=pairs,
        interpolation=float(interpolation),
        retention=float(retention),
    )
