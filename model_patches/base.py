"""What the families share: a decoder behind `get_decoder` whose attention runs through transformers' interface.

A family is one small file: a class of this protocol (`hf_kvpolicy.registry.ModelPatch`) with the model types it serves,
how its keys are positioned when they are cached, and what it refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from hf_kvpolicy.errors import UnsupportedModelError
from hf_kvpolicy.geometry import CacheGeometry
from hf_kvpolicy.own_attention import OwnAttention
from hf_kvpolicy.positions import AlibiSpec, RotarySpec

__all__ = ["InterfacePatch", "LearnedPositionsPatch", "RotaryDecoderPatch"]

# Rotations whose angle at a position depends on the sequence length cannot be shifted afterwards.
_LENGTH_DEPENDENT = ("dynamic", "longrope", "su")


class InterfacePatch:
    """A decoder whose attention runs through transformers' interface; K and V are [batch, head, sequence, channel]."""

    model_types: tuple[str, ...] = ()
    # How it is known that the family is served rightly.
    proof = "patched"
    key_stage = "post_rope"
    attends_itself = False
    # Where the decoder has its layers.
    layers_name = "layers"
    # Whether the decoder's own forward does nothing but embed, mask and run its layers, so that it can be repeated.
    repeats_layers = False

    def decoder(self, model: PreTrainedModel) -> torch.nn.Module:
        """Return the module whose forward receives the cache."""
        named: torch.nn.Module = model.get_decoder() if hasattr(model, "get_decoder") else model
        # Some heads are called `decoder`.
        inner: torch.nn.Module = named if isinstance(named, PreTrainedModel) else model.base_model
        return inner

    def decoder_layers(self, decoder: torch.nn.Module) -> Sequence[torch.nn.Module]:
        """Return the decoder's layers in order.

        Raises:
            UnsupportedModelError: they are not where this family has them.
        """
        layers = getattr(decoder, self.layers_name, None)
        if not isinstance(layers, torch.nn.ModuleList):
            raise UnsupportedModelError(
                f"{type(decoder).__name__} has no list of decoder layers named {self.layers_name!r}, where its family "
                "has them in transformers. Give a model whose code is that of transformers, or, where only dropping "
                "tokens between layers asks for the list, a policy that compresses at the end of a prompt, as snapkv."
            )
        return list(layers)

    def attention(self, decoder: torch.nn.Module) -> torch.nn.Module:
        """Return the first layer's attention module: the one that calls the interface.

        Raises:
            UnsupportedModelError: there is none with a layer index.
        """
        first = CacheGeometry.from_config(decoder.config).attending_layers[0]
        for module in decoder.modules():
            if getattr(module, "layer_idx", None) == first and "Attention" in type(module).__name__:
                return module
        raise UnsupportedModelError(f"{type(decoder).__name__} has no attention layer with a layer index.")

    def methods(self, config: Any) -> Mapping[str, Callable[..., Any]]:
        """Return methods that `attach` sets on the model and `detach` removes; none for most families."""
        return {}

    def check(self, config: Any) -> None:
        """Accept every config of the family."""

    def alibi(self, config: Any) -> AlibiSpec | None:
        """Return None: keys carry positions."""
        return None

    def own_attention(self, decoder: torch.nn.Module) -> OwnAttention:
        """Refuse: attention runs through the attention interface."""
        raise NotImplementedError(f"{type(self).__name__} leaves attention to the attention interface.")


class RotaryDecoderPatch(InterfacePatch):
    """Keys are rotated before they are cached, in all or in the leading channels of a head."""

    # Whether neighbouring channels are paired; else the first half of the rotated ones with the second half.
    interleaved = False

    def rotary(self, decoder: torch.nn.Module, layers: Sequence[int]) -> RotarySpec:
        """Return the decoder's inverse frequencies for these layers of the model.

        Raises:
            UnsupportedModelError: the angles depend on the length, or the module has no single set of frequencies.
        """
        module = self.rotary_module(decoder)
        if module is None:
            raise UnsupportedModelError(
                f"positions='cache_local' moves rotated keys, but {type(decoder).__name__} has no module that rotates "
                "them where this family has it. Make the cache from the model instead of a config, or use "
                "positions='original'."
            )
        kind = self.rope_type(module, decoder, layers)
        if kind in _LENGTH_DEPENDENT:
            raise UnsupportedModelError(
                f"positions='cache_local' moves rotated keys, but this model's rotation ({kind!r}) depends on the "
                "sequence length and cannot be moved afterwards. Use positions='original'."
            )
        frequencies = self.frequencies(module, decoder, layers)
        if not isinstance(frequencies, torch.Tensor):
            raise UnsupportedModelError(
                f"positions='cache_local' needs the model's inverse frequencies, but {type(module).__name__} has none. "
                "Use positions='original'."
            )
        rotated = tuple(self.rotates(decoder, layer) for layer in layers)
        return RotarySpec(
            inverse_frequencies=frequencies,
            interleaved=self.interleaved,
            rotated_layers=None if all(rotated) else rotated,
            amplitude=self.amplitude(module, decoder, layers),
        )

    def rotary_module(self, decoder: Any) -> Any:
        """Return the module that computes rotations."""
        return getattr(decoder, "rotary_emb", None)

    def rope_type(self, module: Any, decoder: Any, layers: Sequence[int]) -> str:
        """Return transformers' name of the rotation of these layers."""
        return str(getattr(module, "rope_type", "default"))

    def frequencies(self, module: Any, decoder: Any, layers: Sequence[int]) -> Any:
        """Return the inverse frequencies of these layers, as the module computed them from its config."""
        return getattr(module, "inv_freq", None)

    def amplitude(self, module: Any, decoder: Any, layers: Sequence[int]) -> float:
        """Return what cosine and sine of these layers are multiplied with."""
        return float(getattr(module, "attention_scaling", 1.0))

    def rotates(self, decoder: torch.nn.Module, layer: int) -> bool:
        """Whether a layer of the model rotates its keys."""
        return True


class LearnedPositionsPatch(InterfacePatch):
    """Positions are learned vectors, added to the embeddings once: keys cannot be given other positions afterwards."""

    key_stage = "no_rope"

    def rotary(self, decoder: torch.nn.Module, layers: Sequence[int]) -> RotarySpec:
        """Refuse: nothing is rotated.

        Raises:
            UnsupportedModelError: always.
        """
        raise UnsupportedModelError(
            f"positions='cache_local' moves rotated keys, but {type(decoder).__name__} adds learned positions to its "
            "embeddings, which no key can be moved out of. Use positions='original'."
        )
