"""Policies that distribute a budget over layers and heads."""

from .adakv import AdaKVCache
from .headkv import HeadKVCache
from .pyramidkv import PyramidKVCache
from .zigzagkv import ZigZagKVCache

__all__ = ["AdaKVCache", "HeadKVCache", "PyramidKVCache", "ZigZagKVCache"]
