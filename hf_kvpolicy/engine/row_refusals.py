"""What is said of rows that a layer must not bring.

Letters: B batch rows, H KV heads, T new tokens, D head dimension.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = ["refuse_again", "refuse_rows"]


def refuse_again(layer: int) -> NoReturn:
    """Refuse a layer that brings rows twice in one forward.

    Raises:
        ConfigError: always.
    """
    raise ConfigError(
        f"Layer {layer} brings rows a second time in one forward. Either an earlier forward died and this model "
        "was not made ready for policy caches, so that no new forward began: call hf_kvpolicy.attach(model) once. "
        "Or the model calls one cache layer from several of its layers, which is not supported."
    )


def refuse_rows(
    layer: int, keys_BHTD: Tensor, expected: tuple[int, int, int, int], dtype: torch.dtype | None
) -> NoReturn:
    """Refuse keys of another shape than `expected`, [B, H, T, D], or else of another dtype than is held.

    Raises:
        ConfigError: always.
    """
    if keys_BHTD.shape != expected:
        raise ConfigError(
            f"Layer {layer} brings keys of shape {tuple(keys_BHTD.shape)}, but this cache was made for "
            f"{expected} (batch, KV heads, tokens, head dimension). Make the cache for this model."
        )
    raise ConfigError(
        f"Layer {layer} brings keys in {keys_BHTD.dtype}, but the cache holds {dtype}. "
        "Keep one dtype for the life of a cache, or call cache.reset() first."
    )
