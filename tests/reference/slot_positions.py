"""StreamingLLM written out: keys are kept before rotation and rotated by cache slot at every step (batch 1, Llama).

Shares no code with the library: its own rotation, attention and eviction, over a Llama's weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class SlotPositionLlama:
    """Feeds tokens through a Llama while holding `sinks` first and `budget - sinks` newest pre-rotation keys."""

    def __init__(self, model: nn.Module, budget: int, sinks: int) -> None:
        self.model, self.budget, self.sinks = model, budget, sinks
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    @torch.no_grad()
    def feed(self, ids: Tensor) -> Tensor:
        """Return the logits of every fed token, [T, V]; eviction follows the forward."""
        decoder, config = self.model.model, self.model.config
        hidden = decoder.embed_tokens(ids)[0]
        for number, layer in enumerate(decoder.layers):
            attention = layer.self_attn
            normed = layer.input_layernorm(hidden)
            query = self._heads(attention.q_proj(normed), config.num_attention_heads)
            key = self._heads(attention.k_proj(normed), config.num_key_value_heads)
            value = self._heads(attention.v_proj(normed), config.num_key_value_heads)
            if number < len(self.keys):
                key = torch.cat([self.keys[number], key], dim=1)
                value = torch.cat([self.values[number], value], dim=1)
            hidden = hidden + attention.o_proj(self._attend(query, key, value, decoder))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            self._keep(number, key, value)
        return self.model.lm_head(decoder.norm(hidden))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, decoder: nn.Module) -> Tensor:
        rows, tokens = key.shape[1], query.shape[1]
        group = query.shape[0] // key.shape[0]
        frequencies = decoder.rotary_emb.inv_freq
        slots = torch.arange(rows)
        turned_key = _rotate(key, slots, frequencies).repeat_interleave(group, 0)
        turned_query = _rotate(query, slots[rows - tokens :], frequencies)
        logits = turned_query @ turned_key.transpose(1, 2) / query.shape[2] ** 0.5
        causal = torch.ones(tokens, rows, dtype=torch.bool).tril(rows - tokens)
        weights = logits.float().masked_fill(~causal, float("-inf")).softmax(-1).to(value.dtype)
        return (weights @ value.repeat_interleave(group, 0)).transpose(0, 1).reshape(tokens, -1)

    def _keep(self, number: int, key: Tensor, value: Tensor) -> None:
        if key.shape[1] > self.budget:
            newest = key.shape[1] - (self.budget - self.sinks)
            key = torch.cat([key[:, : self.sinks], key[:, newest:]], dim=1)
            value = torch.cat([value[:, : self.sinks], value[:, newest:]], dim=1)
        if number == len(self.keys):
            self.keys.append(key)
            self.values.append(value)
        self.keys[number], self.values[number] = key, value

    @staticmethod
    def _heads(projected: Tensor, heads: int) -> Tensor:
        return projected.view(projected.shape[0], heads, -1).transpose(0, 1)


def _rotate(rows: Tensor, positions: Tensor, frequencies: Tensor) -> Tensor:
    angles = positions[:, None].float() * frequencies[None, :].float()
    cos, sin = torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()
    cos, sin = cos.to(rows.dtype), sin.to(rows.dtype)
    half = rows.shape[-1] // 2
    return rows * cos + torch.cat([-rows[..., half:], rows[..., :half]], -1) * sin
