"""The exact cache: every row of every token stays.

Baseline of every comparison (visibility contract, section 0x03): V(F) = {0, ..., F-1}.

Deviations: none.
Not supported: a budget.
"""

from __future__ import annotations

from typing import Any

from ...engine import Composition
from ...evidence import Recency
from ...registry import register_policy
from ..base import ModelOrConfig, PolicyCache, block_rows_of, row_representation

__all__ = ["FullCache"]


@register_policy("full")
class FullCache(PolicyCache):
    """Keeps everything; equals `DynamicCache`, with the ledger and the transaction of all other policies."""

    def __init__(
        self, model_or_config: ModelOrConfig, *, quantize: str | None = None, block_rows: int | None = None
    ) -> None:
        """Make an empty cache.

        Args:
            model_or_config: a model (it is attached) or a config.
            quantize: "int8" or "int4" for older rows: keys per channel of a block, values per row.
            block_rows: rows of a block, with quantize only, None for 32; as many of the newest rows, and fewer than
                twice as many, are not quantized.

        Raises:
            ConfigError: an option is outside its range.
        """
        composition = Composition(
            policy="full",
            schedule="never",
            evidence=Recency(),
            unit="token",
            representation=row_representation("full", quantize, block_rows),
            options={"quantize": quantize, "block_rows": block_rows_of("full", quantize, block_rows)},
        )
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {}
