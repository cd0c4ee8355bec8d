"""StreamingLLM: attention sinks and the newest rows.

Xiao, Tian, Chen, Han, Lewis: "Efficient Streaming Language Models with Attention Sinks" (arXiv 2309.17453), section
3.2; visibility contract, section 0x05: V(F) = {0, ..., min(K_s, F) - 1} u {max(0, F - W), ..., F - 1}, a union.

`budget` = K_s sinks + W recent rows. Positions are numbered inside the cache by default, as in the paper: keys of sinks
are re-rotated towards the query each step, recent keys keep their mutual distances (`positions/cache_local.py`). With
ALiBi no key moves: its bias is taken from those numbers, as in the paper's runs of MPT.

Deviations: eviction happens after attention, so a query attends to at most budget + 1 rows, itself included (as in the
official perplexity loop). A prompt longer than the budget is attended in full once; the paper's demo makes room first.
Not supported: `cache_local` on models whose rotation depends on the length (dynamic, longrope), or that have neither
rotation nor ALiBi; `on_append="append"` (the budget holds after every step).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...evidence import Recency
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, bounded_only, compose

__all__ = ["StreamingLLMCache"]


@register_policy("streaming_llm")
class StreamingLLMCache(PolicyCache):
    """Keeps the first `sinks` rows and the newest rows, `budget` together; the same in every layer and head."""

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        sinks: int = 4,
        positions: str = "cache_local",
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
            budget: rows per KV head, share of the prompt, or bytes; sinks are inside it.
            sinks: first tokens that always stay.
            positions: "cache_local" (paper) or "original".
            protect: further token positions that always stay, inside the budget.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, and fewer than
                twice as many, are not quantized.
            merge_layers: "minicache", or its options as a mapping: kept rows are merged over pairs of layers.

        Raises:
            BudgetError: the budget is not positive, or sinks and protected rows fill it.
            UnsupportedModelError: cache-local positions on a model whose rotation cannot be shifted.
        """
        common = {
            "budget": budget,
            "unit": unit,
            "group": group,
            "protect": protect,
            "on_append": bounded_only(on_append, "streaming_llm"),
            "chunked_prefill": chunked_prefill,
            "variant": variant,
            "fallback": fallback,
            "quantize": quantize,
            "block_rows": block_rows,
            "merge_layers": merge_layers,
        }
        own = {"sinks": sinks, "positions": positions}
        composition = compose(
            "streaming_llm",
            common,
            own,
            model=model_or_config,
            schedule="every_step",
            evidence=Recency(),
            sinks=sinks,
            positions=positions,
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 5)}
