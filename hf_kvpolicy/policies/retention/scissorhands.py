"""Scissorhands: rows that were repeatedly below the uniform share go first, many at once.

Liu et al., "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test
Time" (arXiv 2305.17118), Algorithm 2; visibility contract, sections 0x06B-0x06D: I[j] = number of the last `history`
queries whose attention to row j was below 1/n, n = rows that query could see. When more than `budget` rows would be
held, the `recent` newest stay, and the max(int(drop_ratio * budget), excess) rows with the largest counts are dropped
at once.

Deviations: the printed slice I[:-r] <- 0 would protect old rows; the newest are protected, as the paper's text says.
Budgets are equal for all layers (the paper gives later layers more). Attention of a group's query heads is reduced
first (`group`), mean by default. Among equal counts the lower position is dropped. `variant="reference"` uses the
released code's threshold: the value at rank int(0.9 n) of each query's probabilities; that code frees no memory, this
does.
Not supported: `on_append="append"` (the budget holds after every step).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...errors import ConfigError
from ...evidence import LowScoreHistory
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, bounded_only, check_ratio, compose

__all__ = ["ScissorhandsCache"]


@register_policy("scissorhands")
class ScissorhandsCache(PolicyCache):
    """Keeps rows that were attended to; between drops the cache grows back to its budget."""

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        history: int = 400,
        recent: int = 10,
        drop_ratio: float = 0.5,
        group: str = "mean",
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
            history: last queries whose low scores are counted.
            recent: newest rows that always stay.
            drop_ratio: share of the budget that is dropped at once when it is exceeded.
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
        check_ratio("scissorhands", "drop_ratio", drop_ratio)
        if history < 1 or recent < 0:
            raise ConfigError(f"scissorhands: history={history} must be at least 1, and recent={recent} not negative.")
        common = {
            "budget": budget,
            "unit": unit,
            "group": group,
            "protect": protect,
            "on_append": bounded_only(on_append, "scissorhands"),
            "chunked_prefill": chunked_prefill,
            "variant": variant,
            "fallback": fallback,
            "quantize": quantize,
            "block_rows": block_rows,
            "merge_layers": merge_layers,
        }
        own = {"history": history, "recent": recent, "drop_ratio": drop_ratio, "grace": grace}
        composition = compose(
            "scissorhands",
            common,
            own,
            model=model_or_config,
            schedule="when_full",
            evidence=LowScoreHistory(history=history, quantile=0.9 if variant == "reference" else None),
            drop_ratio=drop_ratio,
            window_rows=max(recent, grace),
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 2), "recent": 0}
