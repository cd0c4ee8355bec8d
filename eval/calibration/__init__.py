"""Measuring a checkpoint once: which heads find a needle (HeadKV), how many rows layers need (ZigZagKV)."""

from collections.abc import Callable

from ...profiles import Profile
from .headkv import calibrate_headkv
from .plan import PROBES, Plan
from .zigzagkv import calibrate_zigzagkv

__all__ = ["CALIBRATIONS", "PROBES", "Plan", "calibrate_headkv", "calibrate_zigzagkv"]

# Policies that have a profile.
CALIBRATIONS: dict[str, Callable[..., Profile]] = {"headkv": calibrate_headkv, "zigzagkv": calibrate_zigzagkv}
