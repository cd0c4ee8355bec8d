"""Policies that keep original rows."""

from .full import FullCache
from .h2o import H2OCache
from .keyformer import KeyformerCache
from .random import RandomCache
from .scissorhands import ScissorhandsCache
from .sliding_window import SlidingWindowCache
from .snapkv import SnapKVCache
from .streaming_llm import StreamingLLMCache

__all__ = [
    "FullCache",
    "H2OCache",
    "KeyformerCache",
    "RandomCache",
    "ScissorhandsCache",
    "SlidingWindowCache",
    "SnapKVCache",
    "StreamingLLMCache",
]
