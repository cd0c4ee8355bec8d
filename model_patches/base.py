"""What the families share: decoders behind `get_decoder`, rotary modules with one set of inverse frequencies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvpolicy.errors import UnsupportedModelError
from hf_kvpolicy.own_attention import OwnAttention
from hf_kvpolicy.positions import AlibiSpec, RotarySpec

__all__ = ["RotaryDecoderPatch"]

# Rotations whose angle at a position depends on the sequence length cannot be shifted afterwards.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


class RotaryDecoderPatch:
    """A decoder whose keys are rotated (first half of a head paired with its second half) before they are cached.

    Attention runs through transformers' attention interface; K and V are [batch, KV head, sequence, channel].
    """

    model_types: tuple[str, ...] = ()
    key_stage = "post_rope"
    attends_itself = False

    def decoder(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the module whose forward receives the cache."""
        inner: torch.nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
        return inner

    def decoder_layers(self, decoder: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Return the decoder's layers in order.

        Raises:
            UnsupportedModelError: they are not where this family has them.
        """
        layers = getattr(decoder, "layers", None)
        if not isinstance(layers, torch.nn.ModuleList):
            raise UnsupportedModelError(
                f"{type(decoder).__name__} has no list of decoder layers, so no token can be dropped between them. "
                "Use a policy that compresses at the end of a prompt, such as snapkv."
            )
        return list(layers)

    def check(self, config: Any) -> None:
        """Accept every config of the family."""

    def alibi(self, config: Any) -> AlibiSpec | None:
        """Return None: keys carry positions."""
        return None

    def own_attention(self, decoder: torch.nn.Module) -> OwnAttention:
        """Refuse: attention runs through the attention interface."""
        raise NotImplementedError(f"{type(self).__name__} leaves attention to the attention interface.")

    def rotary(self, decoder: torch.nn.Module) -> RotarySpec:
        """Return the decoder's inverse frequencies.

        Raises:
            UnsupportedModelError: the angles depend on the length, or the module has no single set of frequencies.
        """
        module = getattr(decoder, "rotary_emb", None)
        kind = str(getattr(module, "rope_type", "default"))
        if kind in _LENGTH_DEPENDENT:
            raise UnsupportedModelError(
                f"positions='cache_local' moves rotated keys, but this model's rotation ({kind!r}) depends on the "
                "sequence length and cannot be moved afterwards. Use positions='original'."
            )
        frequencies = getattr(module, "inv_freq", None)
        if not isinstance(frequencies, torch.Tensor):
            raise UnsupportedModelError(
                f"positions='cache_local' needs the model's inverse frequencies, but {type(module).__name__} has none. "
                "Use positions='original'."
            )
        return RotarySpec(inverse_frequencies=frequencies)
