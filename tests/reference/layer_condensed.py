"""A Llama decoder with condensed layers, run one token at a time, written out from its weights.

Every layer but the producers reads somebody else's rows. Where they are a later layer's, the token's own row is not
among them; a token that then has nothing to read gets zeros from attention.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Rows = dict[int, list[tuple[Tensor, Tensor]]]


def normed(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return weight * x / torch.sqrt((x * x).mean() + epsilon)


def rotated(x_HD: Tensor, position: int, theta: float) -> Tensor:
    """Turn channels d and d + D / 2 of every head by position / theta^(2 d / D)."""
    half = x_HD.shape[1] // 2
    angles = position / theta ** (torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x_HD), angles.sin().to(x_HD)
    first, second = x_HD[:, :half], x_HD[:, half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=1)


def attended(query_QD: Tensor, rows: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Each query head over the rows of its KV head; zeros where there are none."""
    if not rows:
        return torch.zeros_like(query_QD)
    group = query_QD.shape[0] // rows[0][0].shape[0]
    heads = []
    for head, query in enumerate(query_QD):
        keys = torch.stack([key[head // group] for key, _ in rows])
        values = torch.stack([value[head // group] for _, value in rows])
        weights = torch.softmax(keys @ query / query.shape[0] ** 0.5, dim=0)
        heads.append(weights @ values)
    return torch.stack(heads)


class Decoder:
    """Feed token ids one by one; the rows of producers stay, and nothing else."""

    def __init__(self, weights: Mapping[str, Tensor], config: Any, producers: Sequence[int]) -> None:
        self.weights, self.config, self.producers = weights, config, list(producers)
        self.rows: Rows = {layer: [] for layer in sorted(set(producers))}
        self.fed = 0

    def feed(self, token: int) -> Tensor:
        """Return the logits [V] that follow a token."""
        w, config = self.weights, self.config
        x = w["model.embed_tokens.weight"][token]
        for layer in range(len(self.producers)):
            x = self._layer(layer, x)
        self.fed += 1
        return w["lm_head.weight"] @ normed(x, w["model.norm.weight"], config.rms_norm_eps)

    def _layer(self, layer: int, x: Tensor) -> Tensor:
        name, w, config = f"model.layers.{layer}", self.weights, self.config
        dim = w[f"{name}.self_attn.q_proj.weight"].shape[0] // config.num_attention_heads
        inner = normed(x, w[f"{name}.input_layernorm.weight"], config.rms_norm_eps)
        query, key, value = (
            (w[f"{name}.self_attn.{part}_proj.weight"] @ inner).view(-1, dim) for part in ("q", "k", "v")
        )
        theta = config.rope_parameters["rope_theta"]
        if layer in self.rows:
            self.rows[layer].append((rotated(key, self.fed, theta), value))
        # A later producer has no row of this token yet; its own, or a lower one's, has.
        read = self.rows[self.producers[layer]]
        assert len(read) == self.fed + (self.producers[layer] <= layer)
        output = attended(rotated(query, self.fed, theta), read)
        x = x + w[f"{name}.self_attn.o_proj.weight"] @ output.reshape(-1)
        inner = normed(x, w[f"{name}.post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (w[f"{name}.mlp.{part}_proj.weight"] @ inner for part in ("gate", "up"))
        return x + w[f"{name}.mlp.down_proj.weight"] @ (torch.nn.functional.silu(gate) * up)


def iterated_logits(
    weights: Mapping[str, Tensor], config: Any, producers: Sequence[int], tokens: Sequence[int], passes: int
) -> Tensor:
    """Return the logits [T, V] of a prompt whose tokens are computed together, `passes` times, without any trick.

    In each pass a layer that reads a later one finds its rows of the pass before, zeros in the first.
    """
    heads, dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    dim = getattr(config, "head_dim", None) or dim
    nothing = torch.zeros(heads, dim, dtype=weights["lm_head.weight"].dtype)
    before: Rows = {layer: [(nothing, nothing)] * len(tokens) for layer in set(producers)}
    logits: list[Tensor] = []
    for _ in range(passes):
        logits, now = [], Decoder(weights, config, producers)
        for t, token in enumerate(tokens):
            one = _InPass(weights, config, producers, before, now.rows)
            one.fed = t
            logits.append(one.feed(token))
        before = now.rows
    return torch.stack(logits)


class _InPass(Decoder):
    """One token of a pass: lower producers of this pass, later ones of the pass before."""

    def __init__(self, weights: Any, config: Any, producers: Sequence[int], before: Rows, now: Rows) -> None:
        super().__init__(weights, config, producers)
        self._before, self._now = before, now

    def _layer(self, layer: int, x: Tensor) -> Tensor:
        producer = self.producers[layer]
        kept, self.rows = self.rows, dict(self._now)
        if producer > layer:
            self.rows[producer] = self._before[producer][: self.fed]
        x = super()._layer(layer, x)
        self.rows = kept
        return x
