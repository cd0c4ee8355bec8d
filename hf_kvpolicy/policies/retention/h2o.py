"""H2O: heavy hitters of accumulated attention, and the newest rows.

Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models" (arXiv 2306.14048),
Algorithm 1; visibility contract, section 0x06E: h_t[j] = h_(t-1)[j] + a_t[j] over the rows held, |S_t| = budget,
|S_t - S_(t-1)| <= 1. Of `budget` rows, int(recent_ratio * budget) are the newest, the others the highest sums.

Deviations: sums are fp32 (the released code sums in the model's dtype, which stops counting near 512 in fp16). Rows
belong to KV heads; attention of a group's query heads is reduced per query (`group`), sum by default. The prompt is
attended in full and cut at its end. `variant="reference"` casts probabilities to the model's dtype before they are
summed, as the released real-drop path; its other three paths (masks without eviction, a global non-causal table, a
throughput system) are different algorithms.
Not supported: `on_append="append"` (the budget holds after every step).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...evidence import CumulativeAttention
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, bounded_only, check_ratio, compose

__all__ = ["H2OCache"]


@register_policy("h2o")
class H2OCache(PolicyCache):
    """Keeps heavy hitters and the newest rows; one row is dropped for each new one."""

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        recent_ratio: float = 0.5,
        normalize: bool = False,
        group: str = "sum",
        unit: str = "head",
        protect: Iterable[int] | None = None,
        grace: int = 0,
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
            model_or_config: a model (it is attached) or a config.
            budget: rows per KV head, share of the prompt, or bytes; recent and protected rows are inside it.
            recent_ratio: share of the budget for the newest rows.
            normalize: rows compete by their mean per query that saw them, so that old rows are not favoured.
            group: how the query heads of one KV head are reduced per query: "mean", "max" or "sum".
            unit: "head", "layer" or "token": who shares one set (scores are averaged); "pair" where layers are merged.
            protect: token positions that always stay (for example range(4), or the system prompt).
            grace: rows younger than this many tokens are never dropped.
            chunked_prefill: "hold" or "bounded" for a prompt fed in chunks.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, and fewer than
                twice as many, are not quantized.
            merge_layers: "minicache", or its options as a mapping: kept rows are merged over pairs of layers.

        Raises:
            BudgetError: recent and protected rows do not fit into the budget.
            ConfigError: an option is outside its range.
        """
        check_ratio("h2o", "recent_ratio", recent_ratio)
        common = {
            "budget": budget,
            "unit": unit,
            "group": group,
            "protect": protect,
            "on_append": bounded_only(on_append, "h2o"),
            "chunked_prefill": chunked_prefill,
            "variant": variant,
            "fallback": fallback,
            "quantize": quantize,
            "block_rows": block_rows,
            "merge_layers": merge_layers,
        }
        own = {"recent_ratio": recent_ratio, "normalize": normalize, "grace": grace}
        composition = compose(
            "h2o",
            common,
            own,
            model=model_or_config,
            schedule="every_step",
            evidence=CumulativeAttention(normalize=normalize, rounds_to_model_dtype=variant == "reference"),
            recent_ratio=recent_ratio,
            window_rows=grace,
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 4)}
