"""Model families: one small file each, on one protocol (`hf_kvpolicy.registry.ModelPatch`)."""

from .base import InterfacePatch, LearnedPositionsPatch, RotaryDecoderPatch
from .bloom import BloomPatch
from .falcon import FalconPatch
from .gemma import Gemma2Patch, Gemma3Patch
from .glm4 import Glm4Patch
from .gpt2 import GPT2Patch
from .gpt_neox import GPTNeoXPatch
from .gpt_oss import GptOssPatch
from .hybrid import HybridPatch, HybridWithoutPositionsPatch
from .llama import LlamaPatch
from .llama4 import Llama4Patch
from .mistral import MistralPatch
from .mixtral import MixtralPatch
from .mpt import MptPatch
from .multimodal import Gemma3MultimodalPatch, MRopePatch, Qwen35MultimodalPatch, WrapperPatch
from .olmo2 import Olmo2Patch
from .opt import OPTPatch
from .own import OwnAttentionPatch
from .phi3 import Phi3Patch
from .probed import ProbedPatch
from .qwen import QwenPatch
from .smollm3 import SmolLM3Patch

__all__ = [
    "BloomPatch",
    "FalconPatch",
    "GPT2Patch",
    "GPTNeoXPatch",
    "Gemma2Patch",
    "Gemma3MultimodalPatch",
    "Gemma3Patch",
    "Glm4Patch",
    "GptOssPatch",
    "HybridPatch",
    "HybridWithoutPositionsPatch",
    "InterfacePatch",
    "LearnedPositionsPatch",
    "Llama4Patch",
    "LlamaPatch",
    "MRopePatch",
    "MistralPatch",
    "MixtralPatch",
    "MptPatch",
    "OPTPatch",
    "Olmo2Patch",
    "OwnAttentionPatch",
    "Phi3Patch",
    "ProbedPatch",
    "Qwen35MultimodalPatch",
    "QwenPatch",
    "RotaryDecoderPatch",
    "SmolLM3Patch",
    "WrapperPatch",
]
