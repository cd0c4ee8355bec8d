"""The registered mask function: a lazy record for our caches, the stock mask for everything else.

transformers builds one mask per layer type from one representative layer. Layers that hold different rows cannot share
it, so the record carries the *rule* and each layer evaluates it on the columns of the rows it really holds.
"""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor

from .compat import is_plain_causal, mask_function, mask_rule
from .errors import BackendAdmissionError
from .frame import active_cache
from .graphs import outside_graphs

__all__ = ["MaskRecord", "make_mask"]


class MaskRecord:
    """The masking rule of one forward and layer type."""

    def __init__(self, backend: str | None, arguments: dict[str, Any]) -> None:
        self._backend = backend
        self._arguments = arguments
        self._rule = arguments["mask_function"]
        # Width of the model's own sliding window, self included.
        self.window_tokens: int | None = arguments.get("local_size")

    @classmethod
    @lru_cache(maxsize=1)
    def causal(cls) -> MaskRecord:
        """Return plain causality, for a family whose attention is no function of transformers."""
        return cls(None, {"mask_function": mask_rule(None), "use_vmap": False})

    @property
    def has_stock(self) -> bool:
        """Whether transformers has a mask and an attention function for this forward."""
        return self._backend is not None

    @cached_property
    def stock(self) -> Any:
        """The mask transformers itself would have built; valid while the cache holds every column in order."""
        assert self._backend is not None, "only a record of transformers' own mask has one"
        return mask_function(self._backend)(**self._arguments)

    def stock_on(self, device: torch.device) -> Any:
        """Return that mask where a layer attends: layers may lie on other devices than the model's input."""
        return self.stock.to(device) if hasattr(self.stock, "to") else self.stock

    def rule_only(self) -> MaskRecord:
        """Return a record of the rule alone, without the tensors of this forward."""
        kept = {name: self._arguments.get(name) for name in ("mask_function", "local_size", "use_vmap")}
        return MaskRecord(self._backend, kept)

    def is_causal_for(self, columns: int) -> bool:
        """Whether the rule is plain causality for sequences of that many columns."""
        if is_plain_causal(self._rule):
            return True
        return self.window_tokens is not None and columns <= self.window_tokens

    def allows(self, query_columns: Tensor, row_columns: Tensor) -> Tensor:
        """Evaluate the rule on columns, broadcast against each other: [B, M, T, 1] and [B, M, 1, N].

        Raises:
            BackendAdmissionError: the model composes the mask from functions that are not plain index rules.
        """
        if self._arguments.get("use_vmap"):
            raise BackendAdmissionError(
                "This model builds its attention mask from a function that reads more than positions; it cannot be "
                "evaluated on the rows a compressed cache holds. Use a model with a causal or sliding-window mask."
            )
        batch = torch.arange(row_columns.shape[0], device=row_columns.device).view(-1, 1, 1, 1)
        allowed: Tensor = self._rule(batch, torch.zeros_like(batch[:1]), query_columns, row_columns)
        return allowed


@outside_graphs
def make_mask(backend: str, **arguments: Any) -> Any:
    """Return a `MaskRecord` inside a forward of a policy cache, else exactly what the stock function returns."""
    if active_cache() is None:
        return mask_function(backend)(**arguments)
    return MaskRecord(backend, arguments)
