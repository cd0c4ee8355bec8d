"""Tiny random Llama models, feeding them, and what their attention really saw."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_kvpolicy.compat import cache_argument

VOCAB = 97


def tiny_llama(layers: int = 2, head_dim: int = 8, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """4 query heads, 2 KV heads. Wide weights, so that attention is far from uniform and votes differ clearly."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=head_dim, initializer_range=0.3, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(dtype)


def tokens(count: int, batch: int = 1, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (batch, count), generator=torch.Generator().manual_seed(seed))


def feed(model: LlamaForCausalLM, cache: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Run one forward and return the logits of the last token."""
    with torch.inference_mode():
        return model(ids, attention_mask=mask, logits_to_keep=1, **{cache_argument(): cache}).logits[:, -1]


def kept(cache: Any, batch: int = 0) -> list[list[list[int]]]:
    """Return published token positions [layer][owner]."""
    return [[owner.tolist() for owner in cache.positions(layer, batch)] for layer in range(cache.num_layers)]


def everywhere(positions: list[int], layers: int = 2, owners: int = 2) -> list[list[list[int]]]:
    return [[positions] * owners] * layers


@dataclass
class Capture:
    """Post-rotation queries and keys of one sequence, every token ever fed, per layer."""

    queries: dict[int, list[Tensor]] = field(default_factory=dict)
    keys: dict[int, list[Tensor]] = field(default_factory=dict)

    def see(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        for projection, kind in ((module.q_proj, self.queries), (module.k_proj, self.keys)):
            heads = projection(hidden).view(*hidden.shape[:2], -1, module.head_dim).transpose(1, 2)
            first, second = heads.chunk(2, dim=-1)
            rotated = heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]
            kind.setdefault(module.layer_idx, []).append(rotated[0])

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (queries [L, Q, F, D], keys [L, H, F, D]) in float64."""
        return tuple(
            np.stack([torch.cat(kind[layer], dim=1).double().numpy() for layer in sorted(kind)])
            for kind in (self.queries, self.keys)
        )


@contextmanager
def captured(model: LlamaForCausalLM) -> Iterator[Capture]:
    capture = Capture()
    hooks = [layer.self_attn.register_forward_pre_hook(capture.see, with_kwargs=True) for layer in model.model.layers]
    try:
        yield capture
    finally:
        for hook in hooks:
            hook.remove()
