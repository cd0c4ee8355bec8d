"""Policies that keep original rows."""

from .full import FullCache
from .random import RandomCache
from .sliding_window import SlidingWindowCache
from .snapkv import SnapKVCache
from .streaming_llm import StreamingLLMCache

__all__ = ["FullCache", "RandomCache", "SlidingWindowCache", "SnapKVCache", "StreamingLLMCache"]
