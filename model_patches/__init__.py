"""Model families: one small file each, on one protocol (`hf_kvpolicy.registry.ModelPatch`)."""

from .base import RotaryDecoderPatch
from .llama import LlamaPatch
from .mistral import MistralPatch

__all__ = ["LlamaPatch", "MistralPatch", "RotaryDecoderPatch"]
