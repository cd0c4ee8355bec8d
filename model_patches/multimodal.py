"""Models that put images (video, sound) before a text decoder: the decoder is attached, whatever feeds it is not.

What stands for an image are tokens like any others: they are fed, scored, kept or dropped by the decoder's own policy.
Their text family's patch says how the decoder works. Of wrappers that prepare masks in which tokens look ahead, all but
Gemma 3 are refused (`hf_kvpolicy/unsupported.py`).
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

__all__ = ["Gemma3MultimodalPatch", "MRopePatch", "Qwen35MultimodalPatch", "WrapperPatch"]

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
class Gemma3MultimodalPatch(WrapperPatch):
    """Gemma 3 with images, whose tokens see those of their own image on both sides.

    The model around the decoder makes the masks, so a forward begins there; the rule it gives full layers is evaluated
    on the rows that are held, as any rule is.
    """

    model_types = ("gemma3",)

    def decoder(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the model that joins images and text: it is given a 2-D mask, the text decoder ready-made ones."""
        found: torch.nn.Module = getattr(model, "model", model)
        return found

    def decoder_layers(self, decoder: Any) -> Sequence[torch.nn.Module]:
        """Return the text decoder's layers in order."""
        return super().decoder_layers(decoder.get_decoder())

    def attention(self, decoder: Any) -> torch.nn.Module:
        """Return the text decoder's first attention module."""
        return super().attention(decoder.get_decoder())

    def rotary(self, decoder: Any, layers: Sequence[int]) -> RotarySpec:
        """Return how the text decoder rotates keys."""
        return super().rotary(decoder.get_decoder(), layers)


@register_model_patch
class MRopePatch(RotaryDecoderPatch):
    """Qwen2-VL, Qwen2.5-VL and Qwen3-VL: decoders as Qwen 2 and 3 whose positions have three axes.

    Qwen3-VL adds to the hidden states of images between its first layers, which is no matter of rows.
    """

    model_types = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl")

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
