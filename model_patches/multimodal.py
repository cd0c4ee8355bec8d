"""Models that put images (video, sound) before a text decoder: the decoder is attached, whatever feeds it is not.

What stands for an image are tokens like any others: they are fed, scored, kept or dropped by the decoder's own policy.
Their text family's patch says how the decoder works. Wrappers whose masks let tokens of an image look ahead are refused
(`hf_kvpolicy/unsupported.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvpolicy.errors import UnsupportedModelError
from hf_kvpolicy.geometry import text_config
from hf_kvpolicy.positions import RotarySpec
from hf_kvpolicy.registry import ModelPatch, model_patch, register_model_patch

from .base import InterfacePatch, RotaryDecoderPatch

__all__ = ["MRopePatch", "Qwen35MultimodalPatch", "WrapperPatch"]

_NOT_MOVED = (
    "positions='cache_local' moves rotated keys, but positions of images here have three axes (M-RoPE), and a shift "
    "along one sequence is none along them. Use positions='original'."
)


@register_model_patch
class WrapperPatch(InterfacePatch):
    """LLaVA and its relatives, Mistral 3, InternVL, Idefics 3, SmolVLM, Llama 4 with images."""

    model_types: tuple[str, ...] = (
        "idefics3",
        "internvl",
        "llama4",
        "llava",
        "mistral3",
        "smolvlm",
    )

    def decoder(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the text decoder."""
        inner: Any = super().decoder(model)
        return self._of(inner).decoder(inner)

    def decoder_layers(self, decoder: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Return the decoder's layers in order."""
        return self._of(decoder).decoder_layers(decoder)

    def attention(self, decoder: torch.nn.Module) -> torch.nn.Module:
        """Return the decoder's first attention module."""
        return self._of(decoder).attention(decoder)

    def rotary(self, decoder: torch.nn.Module, layers: Sequence[int]) -> RotarySpec:
        """Return how the decoder rotates keys."""
        return self._of(decoder).rotary(decoder, layers)

    def check(self, config: Any) -> None:
        """Refuse a decoder that its own family's patch would change more of than a name.

        Raises:
            UnsupportedModelError: the text family is not supported, or not inside a wrapper.
        """
        text = text_config(config)
        patch = model_patch(text)
        if patch.attends_itself or patch.methods(text) or patch.alibi(text) is not None:
            raise UnsupportedModelError(
                f"{config.model_type!r} wraps a text decoder of the family {text.model_type!r}, which needs more of "
                "its model than a decoder inside another has. Load the text decoder alone."
            )

    @staticmethod
    def _of(decoder: Any) -> ModelPatch:
        return model_patch(decoder.config)


@register_model_patch
class Qwen35MultimodalPatch(WrapperPatch):
    """Qwen3.5 with images: linear attention beside full attention, whose positions have three axes."""

    model_types = ("qwen3_5",)

    def rotary(self, decoder: torch.nn.Module, layers: Sequence[int]) -> RotarySpec:
        """Refuse.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(_NOT_MOVED)


@register_model_patch
class MRopePatch(RotaryDecoderPatch):
    """Qwen2-VL and Qwen2.5-VL: decoders as Qwen 2 whose positions have three axes."""

    model_types = ("qwen2_5_vl", "qwen2_vl")

    def rotary(self, decoder: torch.nn.Module, layers: Sequence[int]) -> RotarySpec:
        """Refuse.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(_NOT_MOVED)

    def decoder_layers(self, decoder: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Refuse: the rotations that layers are given have three axes too.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"No token can be dropped between the layers of {type(decoder).__name__}: what layers are told of "
            "positions has three axes (M-RoPE). Use a policy that compresses at the end of a prompt, such as snapkv."
        )
