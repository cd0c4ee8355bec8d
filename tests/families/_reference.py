"""Dense references over a family's own modules: nothing is stored away, rows that were dropped are hidden.

Both register an attention function of their own with transformers, which reads the family's eager function, and run an
unattached model with transformers' own cache of every row.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from helpers import CACHE
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from hf_kvpolicy.geometry import STATE_LAYERS, text_config

_MASK = AttentionMaskInterface()["eager"]


@contextmanager
def attending(model: Any, name: str, attend: Any) -> Iterator[None]:
    """Let a model attend by `attend(module, eager, query, keys, values, mask, **arguments)`."""
    before = model.config._attn_implementation

    def function(module: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Any, **arguments: Any) -> Any:
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return attend(module, eager, query, keys, values, mask, **arguments)

    AttentionInterface.register(name, function)
    AttentionMaskInterface.register(name, _MASK)
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _decoder(model: Any) -> Any:
    """Return the module whose attention is named: a model, or the text decoder behind images."""
    return model if text_config(model.config) is model.config else model.get_decoder()


def _whole_cache(config: Any) -> DynamicCache:
    """Return transformers' own cache of every row, and of states where layers have them."""
    config = text_config(config)
    has_states = any(kind in STATE_LAYERS for kind in getattr(config, "layer_types", None) or ())
    return DynamicCache(config=config) if has_states else DynamicCache()


class MaskedReference:
    """Dense attention over every row ever fed, in which each KV head sees only the rows it is told of."""

    def __init__(self, model: Any) -> None:
        self.model = model
        # Of every layer, for every batch row and KV head: which columns fed before are seen; None for all. New columns
        # are seen anyway, unless `hides_new`.
        self.seen: dict[int, list[list[Sequence[int]]]] | None = None
        self.hides_new = False
        # Every row is kept: the mask of a sliding layer hides what its own cache would have let go of.
        self.cache = _whole_cache(model.config)

    @torch.no_grad()
    def feed(self, ids: Tensor, **arguments: Any) -> Tensor:
        """Return the logits of the tokens fed."""
        with attending(_decoder(self.model), "kvtest_masked", self._attend):
            return self.model(ids, **{CACHE: self.cache}, use_cache=True, **arguments).logits

    def _attend(
        self, module: Any, eager: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Any, **more: Any
    ) -> Any:
        if mask is None:
            mask = torch.zeros(1, 1, query.shape[2], keys.shape[2])
        if self.seen is not None and module.layer_idx in self.seen:
            mask = mask + self._hidden(self.seen[module.layer_idx], query, keys)
        return eager(module, query, keys, values, mask, **more)

    def _hidden(self, seen: list[list[Sequence[int]]], query: Tensor, keys: Tensor) -> Tensor:
        batch, rows, new = keys.shape[0], keys.shape[2], query.shape[2]
        hidden = torch.full((batch, keys.shape[1], 1, rows), torch.finfo(query.dtype).min)
        if not self.hides_new:
            hidden[..., rows - new :] = 0
        for row in range(batch):
            for head, columns in enumerate(seen[row]):
                hidden[row, head, 0, list(columns)] = 0
        return hidden.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)


class SlotReference:
    """StreamingLLM written out: keys are kept before rotation and rotated by cache slot, by the family's own functions.

    One sequence; the policy acts on `layers`, the others see every row that their mask shows.
    """

    def __init__(self, model: Any, layers: Sequence[int], budget: int, sinks: int) -> None:
        self.model, self.layers, self.budget, self.sinks = model, layers, budget, sinks
        self.kept: list[int] = []
        self.cache = _whole_cache(model.config)
        inner = model.get_decoder()
        self._decoder = getattr(inner, "model", inner)  # Llama 4 says that it is its own decoder
        self._module = sys.modules[type(self._decoder).__module__]
        self._rotates = False

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Return the logits of the tokens fed; eviction follows."""
        first, length = self.cache.get_seq_length(), ids.shape[1]
        name = "apply_rotary_pos_emb" if hasattr(self._module, "apply_rotary_pos_emb") else "apply_rotary_emb"
        own = getattr(self._module, name)

        def unrotated(query: Tensor, keys: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            self._rotates = True
            return query, keys

        self._rotate, self._shown = own, [*self.kept, *range(first, first + length)]
        setattr(self._module, name, unrotated)
        try:
            with attending(self.model, "kvtest_slots", self._attend):
                logits = self.model(ids, **{CACHE: self.cache}, use_cache=True).logits
        finally:
            setattr(self._module, name, own)
        shown = self._shown
        self.kept = shown[: self.sinks] + shown[-(self.budget - self.sinks) :] if len(shown) > self.budget else shown
        return logits

    def _attend(
        self, module: Any, eager: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Any, **more: Any
    ) -> Any:
        rows, new = keys.shape[2], query.shape[2]
        shown = self._shown if module.layer_idx in self.layers else list(range(rows))
        keys, values = keys[:, :, shown], values[:, :, shown]
        if module.layer_idx in self.layers:
            # Numbered without gaps; every row is seen up to the query's own.
            mask = torch.full((new, len(shown)), torch.finfo(query.dtype).min).triu(len(shown) - new + 1)[None, None]
            window = more.get("sliding_window")
            if window is not None:
                far = torch.ones(new, len(shown), dtype=torch.bool).tril(len(shown) - new - window)
                mask = mask.masked_fill(far, torch.finfo(query.dtype).min)
        if self._rotates:
            self._rotates = False
            query, keys = self._rotated(module, query, keys)
        return eager(module, query, keys, values, mask, **more)

    def _rotated(self, module: Any, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        slots = torch.arange(keys.shape[2])[None]
        kinds = getattr(self.model.config, "layer_types", None)
        rotary = getattr(self._decoder, "rotary_emb", None) or self._decoder.pos_emb
        of_kind = (kinds[module.layer_idx],) if isinstance(getattr(rotary, "rope_type", None), dict) else ()
        if hasattr(rotary, "mrope_section"):
            slots = slots.expand(3, 1, -1)  # text: the same position on all three axes
        angles, new = rotary(keys, slots, *of_kind), query.shape[2]
        if isinstance(angles, Tensor):  # complex, for heads behind tokens
            laid = [part.transpose(1, 2) for part in (query, keys)]
            turned, _ = self._rotate(laid[0], laid[0], angles[:, -new:])
            _, turned_keys = self._rotate(laid[1], laid[1], angles)
            return turned.transpose(1, 2), turned_keys.transpose(1, 2)
        cos, sin = angles
        turned, _ = self._rotate(query, query, cos[:, -new:], sin[:, -new:])
        _, turned_keys = self._rotate(keys, keys, cos, sin)
        return turned, turned_keys
