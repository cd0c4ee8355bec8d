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
from ..base import ModelOrConfig, PolicyCache

__all__ = ["FullCache"]


@register_policy("full")
class FullCache(PolicyCache):
    """Keeps everything; equals `DynamicCache`, with the ledger and the transaction of all other policies."""

    def __init__(self, model_or_config: ModelOrConfig) -> None:
        """Make an empty cache for a model (attaching it) or a config."""
        composition = Composition(policy="full", schedule="never", evidence=Recency(), unit="token")
        super().__init__(model_or_config, composition)

    @staticmethod
    def neutral(total_rows: int) -> dict[str, Any]:
        """Return options under which this policy equals `DynamicCache`."""
        return {}
