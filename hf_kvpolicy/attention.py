"""The registered attention function: hands a layer to the forward it belongs to, or to the stock function.

`update` and this call are tied by a ContextVar and by the identity of the key tensor. A call that carries someone
else's keys, layer or thread is refused instead of run on the wrong rows.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .backends import BACKENDS, run_stock
from .compat import register_attention
from .errors import IntegrityError
from .frame import STEP
from .graphs import outside_graphs
from .masks import MaskRecord, make_mask

__all__ = ["attend_layer", "register"]


def register() -> None:
    """Register our attention and mask functions with transformers (idempotent, nothing is replaced)."""
    for name, backend in BACKENDS.items():
        register_attention(name, partial(attend_layer, backend), partial(make_mask, backend))


@outside_graphs
def attend_layer(
    backend: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend in the layer whose rows were just cached, or as the stock function does where none were. [B, T, Q, D].

    Raises:
        IntegrityError: keys, layer or thread are not those of the cache's last update.
    """
    step = STEP.get()
    if step is None:
        if isinstance(attention_mask, MaskRecord):
            raise IntegrityError(
                f"Layer {getattr(module, 'layer_idx', '?')} attends under a policy cache's mask, but that cache was "
                "not updated in this thread just before. Run the whole forward in one thread, with one cache."
            )
        return run_stock(backend, module, query, key, value, attention_mask, **kwargs)
    STEP.set(None)
    layer = getattr(module, "layer_idx", None)
    if key is not step.keys or value is not step.values or layer != step.model_layer:
        raise IntegrityError(
            f"Layer {layer} attends with keys that are not the ones the policy cache returned for layer "
            f"{step.model_layer}. "
            "The model changes keys after the cache, or shares them across layers; this family is not supported."
        )
    attend = step.run.attend_foreign if step.foreign else step.run.attend
    output = attend(backend, module, query, step, attention_mask, kwargs)
    assert output is not None, "a backend was named"
    return output, None
