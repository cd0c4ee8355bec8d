"""One file a method: a constructor that composes the axes."""

from .retention import (
    FullCache,
    H2OCache,
    KeyformerCache,
    RandomCache,
    ScissorhandsCache,
    SlidingWindowCache,
    SnapKVCache,
    StreamingLLMCache,
)

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
