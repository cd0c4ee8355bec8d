"""What the families share whose attention modules project, cache and attend in forwards of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_kvpolicy.own_attention import Attend, OwnAttention

from .base import RotaryDecoderPatch

__all__ = ["OwnAttentionPatch"]


class OwnAttentionPatch(RotaryDecoderPatch, ABC):
    """A decoder with a list of layers, each with one attention module that is called with a cache."""

    attends_itself = True
    # Where the decoder has its layers, and a layer its attention.
    layers_name = "h"
    attention_name = "self_attention"

    def attention(self, decoder: torch.nn.Module) -> torch.nn.Module:
        """Return the first layer's attention module."""
        first: torch.nn.Module = getattr(self.decoder_layers(decoder)[0], self.attention_name)
        return first

    def own_attention(self, decoder: torch.nn.Module) -> OwnAttention:
        """Return the attention modules and the family's forward."""
        modules = tuple(getattr(layer, self.attention_name) for layer in self.decoder_layers(decoder))
        return OwnAttention(modules=modules, forward=self.attention_forward)

    @staticmethod
    @abstractmethod
    def attention_forward(module: Any, attend: Attend, arguments: Mapping[str, Any]) -> tuple[Tensor, None]:
        """Do what the module's own forward does, with `attend` in the place of cache and softmax."""
