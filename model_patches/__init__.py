"""Model families: one small file each, on one protocol (`hf_kvpolicy.registry.ModelPatch`)."""

from .base import RotaryDecoderPatch
from .bloom import BloomPatch
from .falcon import FalconPatch
from .llama import LlamaPatch
from .mistral import MistralPatch
from .mpt import MptPatch
from .own import OwnAttentionPatch

__all__ = [
    "BloomPatch",
    "FalconPatch",
    "LlamaPatch",
    "MistralPatch",
    "MptPatch",
    "OwnAttentionPatch",
    "RotaryDecoderPatch",
]
