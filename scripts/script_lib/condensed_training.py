"""A Llama trained with condensed layers: its layers are run several times, and gradients flow through the last runs.

What is computed is what `LayerCondensedCache(encoding="iterated")` computes of a prompt, without a cache and with
gradients (Wu and Tu, arXiv 2405.10637): of m + b runs the first m only give the rows that the others begin with.

Letters: B batch rows, T tokens, E hidden channels, Q query heads, H KV heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, pad, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

Rows = dict[int, tuple[Tensor, Tensor]]


def iterated_logits(model: Any, ids_BT: Tensor) -> Tensor:
    """Return the logits [B, T, V] of whole sequences; gradients flow through the last `backward_passes` runs."""
    entry, decoder = model.config.kvpolicy, model.model
    hidden_BTE = decoder.embed_tokens(ids_BT)
    positions = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
    rotations = decoder.rotary_emb(hidden_BTE, position_ids=positions)
    rows: Rows = {}
    last_BTE = hidden_BTE
    for run in range(entry["forward_passes"] + entry["backward_passes"]):
        with torch.set_grad_enabled(run >= entry["forward_passes"] and torch.is_grad_enabled()):
            last_BTE, rows = _run(decoder.layers, hidden_BTE, rotations, entry["map"], rows)
    logits: Tensor = model.lm_head(decoder.norm(last_BTE))
    return logits


def next_token_loss(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Return the mean loss of every token but the first, in nats."""
    return cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), ids_BT[:, 1:].flatten())


def _run(
    layers: Any, hidden_BTE: Tensor, rotations: tuple[Tensor, Tensor], producers: Sequence[int], before: Rows
) -> tuple[Tensor, Rows]:
    """Return the hidden states behind the last layer, and the producers' rows of this run."""
    now: Rows = {}
    for index, layer in enumerate(layers):
        attention, inner = layer.self_attn, layer.input_layernorm(hidden_BTE)
        shape = (*inner.shape[:2], -1, attention.head_dim)
        query = attention.q_proj(inner).view(shape).transpose(1, 2)
        # A layer without rows of its own has projections for them, but they are never used.
        keys, values = (part(inner).view(shape).transpose(1, 2) for part in (attention.k_proj, attention.v_proj))
        query, keys = apply_rotary_pos_emb(query, keys, *rotations)
        if producers[index] == index:
            now[index] = keys, values
        reads_later = producers[index] > index
        empty = torch.zeros_like(keys), torch.zeros_like(values)
        read = before.get(producers[index], empty) if reads_later else now[producers[index]]
        output = _attended(query, *read, masks_own=reads_later).transpose(1, 2).flatten(2)
        hidden_BTE = hidden_BTE + attention.o_proj(output)
        hidden_BTE = hidden_BTE + layer.mlp(layer.post_attention_layernorm(hidden_BTE))
    return hidden_BTE, now


def _attended(query_BQTD: Tensor, keys_BHTD: Tensor, values_BHTD: Tensor, *, masks_own: bool) -> Tensor:
    """Attend causally; without a token's own row, the first token attends to a dummy row of zeros. [B, Q, T, D]."""
    if not masks_own:
        return scaled_dot_product_attention(query_BQTD, keys_BHTD, values_BHTD, is_causal=True, enable_gqa=True)
    tokens = query_BQTD.shape[2]
    seen = torch.ones((tokens, tokens), dtype=torch.bool, device=query_BQTD.device).tril(-1)
    seen = pad(seen, (1, 0), value=False)
    seen[0, 0] = True
    keys, values = (pad(rows, (0, 0, 1, 0)) for rows in (keys_BHTD, values_BHTD))
    return scaled_dot_product_attention(query_BQTD, keys, values, attn_mask=seen, enable_gqa=True)
