"""Policies that distribute a budget over layers and heads."""

from .adakv import AdaKVCache
from .fastgen import FastGenCache
from .pyramidkv import PyramidKVCache
from .zigzagkv import ZigZagKVCache

__all__ = ["AdaKVCache", "FastGenCache", "PyramidKVCache", "ZigZagKVCache"]
