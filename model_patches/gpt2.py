"""GPT-2: learned positions. It asks for the implementation's name in one place, which decides how eager attends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hf_kvpolicy.errors import UnsupportedModelError
from hf_kvpolicy.registry import register_model_patch

from .base import LearnedPositionsPatch

__all__ = ["GPT2Patch"]


@register_model_patch
class GPT2Patch(LearnedPositionsPatch):
    """GPT-2."""

    model_types = ("gpt2",)

    def decoder_layers(self, decoder: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Refuse: the decoder gives its output the shape of its input, so no token may be missing behind its layers.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            "A 'gpt2' decoder returns as many positions as it was given, so no token can be dropped between its "
            "layers. Use a policy that compresses at the end of a prompt, such as snapkv."
        )

    def check(self, config: Any) -> None:
        """Refuse what would run another way under our name, or caches more than its own keys.

        Raises:
            UnsupportedModelError: the config upcasts attention by itself, or attends to an encoder.
        """
        if config.reorder_and_upcast_attn:
            raise UnsupportedModelError(
                "This 'gpt2' config has reorder_and_upcast_attn=True, which transformers applies only under the name "
                "'eager', so an attached model would compute something else. Set config.reorder_and_upcast_attn=False."
            )
        if config.add_cross_attention:
            raise UnsupportedModelError(
                "This 'gpt2' config has add_cross_attention=True; policy caches serve decoder-only models. Load the "
                "model without cross-attention."
            )
