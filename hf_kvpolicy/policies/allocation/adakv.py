"""Ada-KV: the heads of a layer compete for its rows, with an equal share as safeguard.

Feng et al., "Ada-KV: Optimizing KV Cache Eviction by Adaptive Budget Allocation for Efficient LLM Inference" (arXiv
2407.11550); section 0x08E. Of a layer's B rows beside the window, B*_i are head i's share of the B best scores of all
heads; it keeps alpha B*_i + (1 - alpha) B / H of its own best rows.

Deviations: whole rows by largest remainder, so a layer's total is exact. Scores are summed over the window's queries
(the released code averages: same ranks). Rows belong to KV heads; votes of a group are reduced before pooling. alpha
weighs the adaptive part, as printed; `alpha=None` is 0.2 for `variant="paper"` and 0.8 for `variant="reference"`,
whose floor of 0.2 is the equal part and whose heads are rounded one by one without a correction of the total.
`evidence="h2o"` scores by the attention of all of the segment's queries without pooling, and `layers="pyramid"` lets
layers share the budget as `pyramidkv` does: contracts of their own, composed here.
Not supported: `unit="layer"` and `unit="token"` (budgets differ by head), the released code's score normalisation.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...allocation import UNIFORM, AdaptiveAllocation, PyramidAllocation
from ...errors import ConfigError
from ...evidence import Evidence, Pooling, SegmentAttention, WindowVotes
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, check_ratio, compose

__all__ = ["AdaKVCache"]


@register_policy("adakv")
class AdaKVCache(PolicyCache):
    """Compresses each prompt segment at its end; heads end with different numbers of rows, stored ragged."""

    units = ("head",)

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        window: int = 32,
        alpha: float | None = None,
        evidence: str = "snapkv",
        layers: str = "uniform",
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
            budget: rows per KV head in the mean, share of the prompt, or bytes; the window is inside it.
            window: last prompt queries that vote, and last rows that always stay.
            alpha: share of a layer's rows that goes to heads by score; the rest is equal. None: 0.2, the paper's
                default (0.8 for variant="reference", the released code's).
            evidence: "snapkv" (votes of the window) or "h2o" (attention of all the segment's queries).
            layers: how layers share the budget first: "uniform" or "pyramid" (with `beta`).
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
            ConfigError: an option is outside its range.
            ManifestError: unit is not "head".
        """
        if alpha is None:
            alpha = 0.8 if variant == "reference" else 0.2
        check_ratio("adakv", "alpha", alpha)
        for name, value, allowed in (
            ("evidence", evidence, ("snapkv", "h2o")),
            ("layers", layers, ("uniform", "pyramid")),
        ):
            if value not in allowed:
                raise ConfigError(f"adakv: {name}={value!r} is unknown; allowed are {allowed}.")
        votes = WindowVotes(window_queries=window, kernel_size=kernel_size, pooling=pooling)
        chosen: Evidence = SegmentAttention() if evidence == "h2o" else votes
        reference = variant == "reference"
        shares = PyramidAllocation(beta=beta, reference=reference) if layers == "pyramid" else UNIFORM
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
            "alpha": alpha,
            "evidence": evidence,
            "layers": layers,
            "beta": beta,
            "kernel_size": kernel_size,
            "pooling": pooling,
        }
        composition = compose(
            "adakv",
            common,
            own,
            model=model_or_config,
            schedule="end_of_prefill",
            evidence=chosen,
            window_rows=window,
            allocation=AdaptiveAllocation(alpha=alpha, layers=shares, reference=reference),
            storage="ragged",
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 2), "window": 1}
