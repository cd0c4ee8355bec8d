"""PyramidKV: SnapKV's rows, more of them in lower layers and fewer in upper ones.

Cai et al., "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling" (arXiv 2406.02069);
section 0x08B. Of the rows beside the window, layer l of m keeps k_l on the line from k_bottom = 2 K / m - k_top down to
k_top = K / (beta m); rows are chosen as in `snapkv`.

Deviations: the line becomes whole rows by largest remainder, so the total is exactly the budget's, and what a short
prompt cannot fill goes to the other layers. Rows belong to KV heads (`group` reduces votes before pooling).
`variant="reference"` keeps the released code's capacities, whose steps are floored and whose total is larger than the
budget's; a prompt below twice the budget is cut uniformly there.
Not supported: `unit="token"` (the budget differs by layer).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...allocation import PyramidAllocation
from ...errors import ConfigError
from ...evidence import Pooling, WindowVotes
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, compose

__all__ = ["PyramidKVCache"]


@register_policy("pyramidkv")
class PyramidKVCache(PolicyCache):
    """Compresses each prompt segment at its end to a pyramid of `budget` rows per owner in the mean."""

    units = ("head", "layer")

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        window: int = 8,
        beta: float = 20,
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
            window: last prompt queries that vote, and last rows that always stay.
            beta: the mean over the top layer's share; 1 is uniform.
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
        if isinstance(beta, bool) or not beta >= 0.5 or (variant == "reference" and (beta < 1 or beta != int(beta))):
            raise ConfigError(
                f"pyramidkv: beta={beta!r} must be at least 0.5 (a whole number of at least 1 for variant='reference')."
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
        own = {"window": window, "beta": beta, "kernel_size": kernel_size, "pooling": pooling}
        composition = compose(
            "pyramidkv",
            common,
            own,
            model=model_or_config,
            schedule="end_of_prefill",
            evidence=WindowVotes(window_queries=window, kernel_size=kernel_size, pooling=pooling),
            window_rows=window,
            allocation=PyramidAllocation(beta=beta, reference=variant == "reference"),
            storage="ragged",
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 2), "window": 1}
