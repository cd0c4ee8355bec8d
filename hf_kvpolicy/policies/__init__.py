"""One file a method: a constructor that composes the axes."""

from .allocation import (
    AdaKVCache,
    FastGenCache,
    HeadKVCache,
    PyramidInferCache,
    PyramidKVCache,
    ZigZagKVCache,
)
from .representation import DMCCache, LayerCondensedCache, MiniCache
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
    "AdaKVCache",
    "DMCCache",
    "FastGenCache",
    "FullCache",
    "H2OCache",
    "HeadKVCache",
    "KeyformerCache",
    "LayerCondensedCache",
    "MiniCache",
    "PyramidInferCache",
    "PyramidKVCache",
    "RandomCache",
    "ScissorhandsCache",
    "SlidingWindowCache",
    "SnapKVCache",
    "StreamingLLMCache",
    "ZigZagKVCache",
]
