"""Random retention: a seeded random subset of the prompt and its last rows.

The baseline every evaluation needs: what a policy is worth is what it adds to this at the same bytes.

Scores are a stateless hash of (seed, layer, KV head, token position), so each head draws its own set and a padded row
keeps what the same row alone keeps. Selection, window and decode behave as in `snapkv`.

Deviations: none (own baseline).
Not supported: rows owned by query heads.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ...evidence import SeededRandom
from ...registry import register_policy
from ..base import BudgetLike, MergeLayers, ModelOrConfig, PolicyCache, compose

__all__ = ["RandomCache"]


@register_policy("random")
class RandomCache(PolicyCache):
    """Keeps `window` newest prompt rows and a random choice of the others; decode rows are appended."""

    def __init__(
        self,
        model_or_config: ModelOrConfig,
        *,
        budget: BudgetLike,
        window: int = 32,
        seed: int = 0,
        unit: str = "head",
        group: str = "mean",
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
            budget: rows per KV head, share of the prompt, or bytes; the window is inside it.
            window: newest rows of each selection that always stay.
            seed: fixes every draw.
            unit: "head", "layer" or "token": who shares one set; "pair" where layers are merged.
            protect: token positions that always stay, inside the budget.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, and fewer than
                twice as many, are not quantized.
            merge_layers: "minicache", or its options as a mapping: kept rows are merged over pairs of layers.

        Raises:
            BudgetError: the budget is not larger than window and protected rows.
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
        own = {"window": window, "seed": seed}
        composition = compose(
            "random",
            common,
            own,
            model=model_or_config,
            schedule="end_of_prefill",
            evidence=SeededRandom(seed=seed),
            window_rows=window,
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {"budget": max(total_rows, 2), "window": 1}
