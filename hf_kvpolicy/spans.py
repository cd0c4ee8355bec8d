"""Which tokens stand behind each stored row."""

from __future__ import annotations

import torch
from torch import Tensor

from .contract import SEGMENTS
from .engine import Runtime
from .records import positions_of

__all__ = ["spans_of"]


def spans_of(runtime: Runtime, layer: int, batch: int) -> list[Tensor]:
    """Return, per KV head, the first and last token behind each row of `positions_of`, int64 [n, 2].

    Where tokens are merged, every token is in a row: each begins behind the one before. A row merged across layers
    stands for its own token in both of them.
    """
    found = positions_of(runtime, layer, batch)
    if runtime.composition.representation.kind != SEGMENTS:
        return [tokens[:, None].expand(-1, 2).clone() for tokens in found]
    return [torch.stack([torch.cat([ends.new_tensor([-1]), ends])[:-1] + 1, ends], dim=1) for ends in found]
