"""Sliding window: the newest W rows stay.

Visibility contract, section 0x04: V(F; W) = {max(0, F - W), ..., F - 1}, |V| = min(F, W).

Keys keep the rotation of their original positions; this is a window put on a model that was trained without one, not
the window of a local-attention architecture. The new token attends to the W published rows and itself.

Deviations: none; chunked prefill ends in the same set as one prompt.
Not supported: cache-local positions (`streaming_llm` with sinks=0 has them); `on_append="append"` (the budget holds
after every step).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...evidence import Recency
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, bounded_only, compose

__all__ = ["SlidingWindowCache"]


@register_policy("sliding_window")
class SlidingWindowCache(PolicyCache):
    """Keeps the newest `budget` rows, the same in every layer and head."""

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        protect: Iterable[int] | None = None,
        chunked_prefill: str | None = None,
        on_append: str = "recompress",
        group: str = "mean",
        unit: str = "token",
        variant: str = "paper",
        fallback: str | None = None,
        quantize: str | None = None,
        block_rows: int | None = None,
        merge_layers: MergeLayers = None,
    ) -> None:
        """Make an empty cache.

        Args:
            model_or_config: a model (it is attached) or a config.
            budget: rows per KV head, share of the prompt, or bytes.
            protect: token positions that always stay, inside the budget.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, and fewer than
                twice as many, are not quantized.
            merge_layers: "minicache", or its options as a mapping: kept rows are merged over pairs of layers.

        Raises:
            BudgetError: the budget is not positive, or protected rows fill it.
        """
        common = {
            "budget": budget,
            "unit": unit,
            "group": group,
            "protect": protect,
            "on_append": bounded_only(on_append, "sliding_window"),
            "chunked_prefill": chunked_prefill,
            "variant": variant,
            "fallback": fallback,
            "quantize": quantize,
            "block_rows": block_rows,
            "merge_layers": merge_layers,
        }
        composition = compose(
            "sliding_window", common, model=model_or_config, schedule="every_step", evidence=Recency()
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": total_rows}
