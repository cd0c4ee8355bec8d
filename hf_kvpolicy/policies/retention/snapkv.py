"""SnapKV: prompt rows that the end of the prompt attends to.

Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv 2404.14469), section 4; visibility
contract, section 0x07. Per owner: vote[j] = sum over the last W queries of softmax(q K^T / sqrt(d))[j], normalised over
every visible key; votes are pooled over neighbouring prefix rows; the best `budget - window` prefix rows and the whole
window stay. Decode appends.

Deviations: rows belong to KV heads, and the votes of a group's query heads are reduced (`group`) before pooling; the
official Llama patch repeats K/V and keeps rows per query head, which is `owner="query_head"` here and is charged H_q
rows. Scores are fp32 (official: cast to the model's dtype before summing). Ties keep the lower position. Padding never
votes. Default pooling is the max pooling with kernel 7 of the paper's LongBench configuration; the official code's
function default is average pooling with kernel 5.
Not supported: selection per layer or cache for rows owned by query heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...evidence import Pooling, WindowVotes
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, compose

__all__ = ["SnapKVCache"]


@register_policy("snapkv")
class SnapKVCache(PolicyCache):
    """Compresses each prompt segment at its end to `budget` rows per owner."""

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        window: int = 32,
        kernel_size: int = 7,
        pooling: Pooling = "max",
        group: str = "mean",
        owner: str = "kv_head",
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
            model_or_config: a model (it is attached) or a config.
            budget: rows per owner, share of the prompt, or bytes; the window is inside it.
            window: last prompt queries that vote, and last rows that always stay.
            kernel_size: odd width of the pooling; 1 turns it off.
            pooling: "max" or "avg".
            group: how votes of the query heads of one KV head are reduced: "mean", "max" or "sum".
            owner: whose rows are kept: "kv_head", or "query_head" (as the official code; H_q rows are stored).
            unit: "head", "layer" or "token": who shares one set; "pair" where layers are merged.
            protect: token positions that always stay, inside the budget (for example the system prompt).
            on_append: what a later prompt segment does: "recompress" everything to the budget, or "append".
            chunked_prefill: "hold" or "bounded" for a prompt fed in chunks.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, and fewer than
                twice as many, are not quantized.
            merge_layers: "minicache", or its options as a mapping: kept rows are merged over pairs of layers.

        Raises:
            BudgetError: the budget is not larger than window and protected rows.
            ConfigError: an option is outside its range.
        """
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
        own = {"window": window, "kernel_size": kernel_size, "pooling": pooling, "owner": owner}
        composition = compose(
            "snapkv",
            common,
            own,
            model=model_or_config,
            schedule="end_of_prefill",
            evidence=WindowVotes(window_queries=window, kernel_size=kernel_size, pooling=pooling),
            window_rows=window,
            owner=owner,
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 2), "window": 1}
