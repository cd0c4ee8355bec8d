"""MiniCache: one stored row for each token in two neighbouring layers.

Liu et al., "MiniCache: KV Cache Compression in Depth Dimension for Large Language Models" (arXiv 2405.14366),
equations 2 and 3; representation contract, section 0x0CF-0x0CH. From `start_layer` on, layers are merged two by two,
keys and values apart. Of the two rows of a token and KV head, one direction is stored, on the arc between theirs (SLERP
at `interpolation`), and both lengths. What attention reads has each layer's length and the shared direction.

Rows whose directions are too far apart are kept as they were, for both layers. A prompt fixes the distance from which
on that is so, for each pair, tensor and KV head: its ceil(retention * T)-th largest angular distance, and a quarter (45
degrees) for prompts under 1 / retention rows. Later rows at or above it are exceptions too. Each row is merged once,
when it is fed, and never again. A prompt fed in chunks takes the threshold from its first chunk.

A policy that selects rows merges what it keeps (`merge_layers`), where both layers of a pair keep the same tokens: the
threshold is then that of the rows which the first prompt's selection keeps.

Per pair and KV head T rows take 2 T d b bytes for shared rows, 16 T for lengths in fp32, and for each row kept apart,
in keys or in values, 2 d b for both layers' rows and 4 for its index.

Deviations: the printed equation 4 keeps rows *below* a distance, against the text; large distances are exceptions here.
The threshold is a rank, not a share of the largest distance, so that the number of exceptions is known. No angle is
stored: it is not needed to restore. Shared rows are scaled to the longer of the two, so that equal rows come back bit
for bit. Nearly opposite rows, whose arc is ill-conditioned, are always exceptions; rows nearer than a millionth of the
half circle never are, unless retention is 1.
Not supported: quantized rows. A kernel that reads merged rows: both layers are restored at every step.
"""

from __future__ import annotations

from typing import Any

from ...engine import Composition
from ...evidence import Recency
from ...registry import register_policy
from ..base import ModelOrConfig, PolicyCache, refuse_quantized
from ..merging import merged_options, merged_pairs

__all__ = ["MiniCache"]


@register_policy("minicache")
class MiniCache(PolicyCache):
    """Merges the rows of neighbouring layers; needs no training and drops no token."""

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        start_layer: int | None = None,
        interpolation: float = 0.6,
        retention: float = 0.05,
        quantize: str | None = None,
    ) -> None:
        """Make an empty cache.

        Args:
            model_or_config: a model (it is attached) or a config.
            start_layer: the first layer that may be merged; None starts in the middle of the model.
            interpolation: where the shared direction lies on the arc from the lower layer's (0) to the deeper's (1).
            retention: share of a prompt's rows that are kept as they were, in [0, 1]; 1 merges nothing.
            quantize: None; merged rows are not coded in few bits.

        Raises:
            ConfigError: an option is outside its range.
            ManifestError: merged rows were to be quantized.
            UnsupportedModelError: no two layers of one geometry follow one another from `start_layer` on.
        """
        refuse_quantized("minicache", quantize)
        rule = merged_pairs(
            "minicache",
            model_or_config,
            start_layer=start_layer,
            interpolation=interpolation,
            retention=retention,
        )
        composition = Composition(
            policy="minicache",
            schedule="never",
            evidence=Recency(),
            unit="token",
            representation=rule,
            options={**merged_options(rule), "quantize": quantize},
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"start_layer": 0, "retention": 1.0}
