"""Layer-condensed models for the tests: graphs, tiny checkpoints of them, ids fed in pieces."""

from __future__ import annotations

from typing import Any

import torch
from helpers import declared, forward, tiny
from torch import Tensor

TEACHING = (0, 5, 5, 5, 5, 5)
# One later producer, all layers; an inner one, as the authors' code has it; two circles and a layer that reads a lower
# one; no circle at all.
GRAPHS = (TEACHING, (5,) * 6, (0, 4, 4, 4, 4, 5), (0, 2, 2, 5, 2, 5), (0, 0, 2, 2, 4, 4))


def condensed(graph: Any, family: str = "llama", *, forward_passes: int = 3, backward_passes: int = 2) -> Any:
    """Return a tiny model of a graph; its layers damp what comes back to them."""
    model = declared(tiny(family, layers=len(graph)), "layer_condensed")
    model.config.kvpolicy = {
        "kind": "layer_condensed",
        "map": list(graph),
        "forward_passes": forward_passes,
        "backward_passes": backward_passes,
    }
    return model


def fed(model: Any, cache: Any, ids: Tensor, widths: Any) -> Tensor:
    """Return the logits of ids fed in pieces."""
    found, done = [], 0
    with torch.no_grad():
        for width in widths:
            found.append(forward(model, ids[:, done : done + width], cache))
            done += width
    return torch.cat(found, dim=1)
