"""Policies whose layers and heads keep different numbers of rows."""

from .adakv import AdaKVCache
from .fastgen import FastGenCache
from .headkv import HeadKVCache
from .pyramidinfer import PyramidInferCache
from .pyramidkv import PyramidKVCache
from .zigzagkv import ZigZagKVCache

__all__ = ["AdaKVCache", "FastGenCache", "HeadKVCache", "PyramidInferCache", "PyramidKVCache", "ZigZagKVCache"]
