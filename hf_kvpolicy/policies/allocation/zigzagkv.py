"""ZigZagKV: SnapKV's rows, and for each layer as many as its attention needs.

Zhong et al., "ZigZagKV: Dynamic KV Cache Compression for Long-context Modeling based on Layer Uncertainty" (arXiv
2412.09036); section 0x08D. LMBA_l is the mean over a layer's query heads of the fewest rows that hold `mass` of the
window's attention; B_l = B_min + (B - B_min) L LMBA_l / sum(LMBA). Rows are chosen as in `snapkv`.

Deviations: LMBA is measured on the window queries' mean attention over every visible row, before pooling. Whole rows by
largest remainder: the total is exactly the budget's, and what a short prompt cannot fill goes to the other layers. Rows
belong to KV heads. The released-code variant does not exist: no code was released.
Not supported: `unit="token"` (the budget differs by layer), `variant="reference"`.
Every layer is held until the last one was measured, so the transient peak is the full prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...allocation import ZigZagAllocation
from ...errors import ConfigError
from ...evidence import Pooling, WindowVotes
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, check_ratio, compose

__all__ = ["ZigZagKVCache"]


@register_policy("zigzagkv")
class ZigZagKVCache(PolicyCache):
    """Compresses each prompt segment at its end, layer by layer as its attention needs."""

    units = ("head", "layer")

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        window: int = 32,
        mass: float = 0.9,
        min_ratio: float = 0.2,
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
            model_or_config: a model (it is attached) or a config.
            budget: rows per KV head in the mean over layers, share of the prompt, or bytes; the window is inside it.
            window: last prompt queries that vote and measure, and last rows that always stay.
            mass: share of the attention whose rows are counted.
            min_ratio: share of the rows beside the window that every layer gets.
            kernel_size: odd width of the pooling; 1 turns it off.
            pooling: "max" or "avg".
            group: how votes of the query heads of one KV head are reduced: "mean", "max" or "sum".
            unit: "head" or "layer": who shares one set.
            protect: token positions that always stay, inside the budget.
            on_append: what a later prompt segment does: "recompress" everything to the budget, or "append".
            chunked_prefill: "hold" or "bounded" for a prompt fed in chunks.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, up to three
                times as many, are not quantized.
            merge_layers: None; heads or layers that hold different numbers of rows share none.

        Raises:
            BudgetError: the budget is not larger than window and protected rows.
            ConfigError: an option is outside its range.
            ManifestError: unit="token".
        """
        check_ratio("zigzagkv", "min_ratio", min_ratio)
        check_ratio("zigzagkv", "mass", mass)
        if not mass:
            raise ConfigError("zigzagkv: mass=0 counts no row; give the share of attention to hold, for example 0.9.")
        if variant == "reference":
            raise ConfigError(
                "zigzagkv: no code was released, so there is no variant='reference'. Use variant='paper'."
            )
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
            "mass": mass,
            "min_ratio": min_ratio,
            "kernel_size": kernel_size,
            "pooling": pooling,
        }
        composition = compose(
            "zigzagkv",
            common,
            own,
            model=model_or_config,
            schedule="end_of_prefill",
            evidence=WindowVotes(window_queries=window, kernel_size=kernel_size, pooling=pooling),
            window_rows=window,
            allocation=ZigZagAllocation(mass=mass, min_ratio=min_ratio),
            storage="ragged",
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 2), "window": 1}
