"""One file a method: a constructor that composes the axes."""

from .retention import FullCache, RandomCache, SlidingWindowCache, SnapKVCache, StreamingLLMCache

__all__ = ["FullCache", "RandomCache", "SlidingWindowCache", "SnapKVCache", "StreamingLLMCache"]
