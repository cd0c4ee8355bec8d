"""The attention of a few tokens over everything before them, as the model itself computes it.

The prompt runs through the model's own backend. The tokens that are looked at run through eager attention, which alone
returns probabilities; with one or a few tokens at a time they are small whatever the prompt's length.

Letters: L layers, Q query heads, T tokens fed, N tokens seen so far.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ...attach import unwrap
from ...compat import cache_argument, set_implementation
from ...errors import UnsupportedModelError
from ..generation import prefill

__all__ = ["Reader"]


class Reader:
    """One prompt inside a model, and what the tokens after it attend to."""

    def __init__(self, model: Any, token_ids: Sequence[int]) -> None:
        """Feed the prompt's tokens, without looking at their attention."""
        self._model = model
        self._cache = DynamicCache(config=model.config)
        prefill(model, [token_ids], self._cache)

    @torch.no_grad()
    def feed(self, token_ids: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Feed more tokens.

        Returns:
            logits [V] after the last one, and the attention of all of them, float32 [L, Q, T, N] on the CPU.
        """
        inner = unwrap(self._model)
        before = str(inner.config._attn_implementation)
        if not set_implementation(inner, "eager"):
            raise UnsupportedModelError(
                f"{type(inner).__name__} keeps its own attention implementation ({before!r}), so what it attends to "
                'cannot be read as it runs. Load the model with attn_implementation="eager".'
            )
        try:
            found = self._model(
                input_ids=torch.tensor([list(token_ids)], device=self._model.device),
                use_cache=True,
                output_attentions=True,
                **{cache_argument(): self._cache},
            )
        finally:
            set_implementation(inner, before)
        return found.logits[0, -1], torch.stack([layer[0].float().cpu() for layer in found.attentions])
