"""PyramidInfer: each layer keeps a share of its context, a smaller one the deeper it lies (section 0x08C).

Source: Yang et al., "PyramidInfer: Pyramid KV Cache Compression for High-throughput LLM Inference" (arXiv 2405.12532),
with the cosine schedule of the released code: r_l = d + (1 - d) (cos(pi l / L) + 1) / 2. In a prompt it is applied to
what the layer below left, in decode to blocks of so many tokens. Counts follow from lengths alone, so a whole prompt
is planned before its first layer runs.

Letters: L layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ..errors import ConfigError
from .apportion import apportion

__all__ = ["BlockDecay", "DepthDecay"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthDecay:
    """How many rows of its context each layer keeps."""

    # The share that the last layer would keep; 1 keeps everything.
    decay: float
    # Only every `interval`-th layer drops anything.
    interval: int
    # A context is never cut to this many rows or fewer.
    min_context: int

    def __post_init__(self) -> None:
        """Reject schedules that keep nothing or never end.

        Raises:
            ConfigError: decay outside (0, 1], interval below 1, min_context below 0.
        """
        if isinstance(self.decay, bool) or not 0.0 < self.decay <= 1.0:
            raise ConfigError(f"decay={self.decay!r} is the share that the last layer keeps; give a number in (0, 1].")
        for name, value, least in (("interval", self.interval, 1), ("min_context", self.min_context, 0)):
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ConfigError(f"{name}={value!r} must be a whole number of at least {least}.")

    def ratio(self, layer: int, layers: int) -> float:
        """Return the share of its context that one layer keeps."""
        return _cosine(self.decay, layer, layers)

    def kept_rows(
        self, held_L: Sequence[int], new: int, *, pinned: int, mean_rows: int | None = None
    ) -> tuple[int, ...]:
        """Return how many rows of its context each layer keeps.

        A layer's context is what it holds already and those new tokens that the layers below passed on. Held rows and
        new ones are expected to stay in equal shares; a layer that more or fewer tokens reach keeps what is planned, or
        all there are.

        Args:
            held_L: rows each layer holds from earlier segments.
            new: tokens of this segment that compete in the first layer.
            pinned: rows among them that stay in every layer.
            mean_rows: the mean over layers may not exceed it. Where the schedule would, every layer's context shrinks
                by the same factor, in whole rows whose sum is exact.
        """
        kept, passing = [], new
        for layer, held in enumerate(held_L):
            context = held + passing
            rows = max(self._scheduled(context, layer, len(held_L)), min(pinned, context))
            kept.append(rows)
            passing = passing * rows // context if context else 0
        total = sum(kept) if mean_rows is None else mean_rows * len(kept)
        if total < sum(kept):
            targets = [Fraction(total * rows, sum(kept)) for rows in kept]
            kept = apportion(targets, total, [min(pinned, rows) for rows in kept], kept)
        return tuple(kept)

    def describe(self) -> dict[str, Any]:
        """Return the schedule's parameters."""
        return {"decay": self.decay, "interval": self.interval, "min_context": self.min_context}

    def _scheduled(self, context: int, layer: int, layers: int) -> int:
        if layer % self.interval:
            return context
        rows = int(context * self.ratio(layer, layers))
        return rows if rows > self.min_context else context


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDecay:
    """How many rows of a block of decode tokens each layer keeps."""

    # Tokens of a block; all layers choose from it at once.
    tokens: int
    # The share that the first layer keeps, and the factor to which it falls with depth.
    ratio: float
    decay: float

    def __post_init__(self) -> None:
        """Reject blocks and shares that keep nothing.

        Raises:
            ConfigError: tokens below 1, ratio or decay outside (0, 1].
        """
        if isinstance(self.tokens, bool) or not isinstance(self.tokens, int) or self.tokens < 1:
            raise ConfigError(f"decode_block={self.tokens!r} must be a whole number of at least 1, or None.")
        for name, value in (("decode_ratio", self.ratio), ("decode_decay", self.decay)):
            if isinstance(value, bool) or not 0.0 < value <= 1.0:
                raise ConfigError(f"{name}={value!r} is a share of a block of decode tokens; give a number in (0, 1].")

    def kept_rows(self, layer: int, layers: int) -> int:
        """Return how many rows of a block one layer keeps, one at least."""
        return max(1, int(self.tokens * self.ratio * _cosine(self.decay, layer, layers)))

    def describe(self) -> dict[str, Any]:
        """Return the schedule's parameters."""
        return {"tokens": self.tokens, "ratio": self.ratio, "decay": self.decay}


def _cosine(decay: float, layer: int, layers: int) -> float:
    """Return the factor of one layer: 1 in the first one, near `decay` in the last."""
    return (1.0 - decay) * (math.cos(math.pi * layer / layers) + 1) / 2 + decay
