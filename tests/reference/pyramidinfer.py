"""Plain oracle of PyramidInfer (arXiv 2405.12532; contract 0x08C): a Llama that runs its own loop, in float64.

One unpadded sequence. Each layer attends over what it holds and the tokens that reach it; a prompt then keeps k_l rows
of its context by the attention of the newest queries, and only those and the newest tokens go on to the next layer.
An answer's tokens reach every layer. When the oldest block of them that nobody decided on is older than the recent
tokens, each layer keeps the rows of the block that the tokens behind it attended to most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import cos, floor, pi
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def planned(
    held: Sequence[int], new: int, *, decay: float, min_context: int, interval: int, pinned: int = 0,
    mean_rows: int | None = None,
) -> list[int]:  # fmt: skip
    """Return context rows kept by each layer; `held` rows are there before, `new` tokens compete in the first layer."""
    kept, reach, layers = [], new, len(held)
    for layer, old in enumerate(held):
        context = old + reach
        rows = context
        if layer % interval == 0:
            scheduled = int(context * ((1 - decay) * (cos(pi * layer / layers) + 1) / 2 + decay))
            rows = scheduled if scheduled > min_context else context
        rows = max(rows, min(pinned, context))
        kept.append(rows)
        reach = reach * rows // context if context else 0
    if mean_rows is None or sum(kept) <= mean_rows * layers:
        return kept
    total = mean_rows * layers
    targets = [Fraction(total * rows, sum(kept)) for rows in kept]
    scaled = [max(floor(target), min(pinned, rows)) for target, rows in zip(targets, kept, strict=True)]
    while sum(scaled) < total:
        scaled[max(range(layers), key=lambda i: (targets[i] - scaled[i], -i))] += 1
    while sum(scaled) > total:
        can = [i for i in range(layers) if scaled[i] > min(pinned, kept[i])]
        scaled[max(can, key=lambda i: (scaled[i] - targets[i], i))] -= 1
    return scaled


@dataclass
class Held:
    """Rows of one layer, ascending."""

    tokens: list[int] = field(default_factory=list)
    keys: Array | None = None  # [H, n, D]
    values: Array | None = None
    # For every decode token since the last prompt: the attention it gave to each token, in the mean over heads.
    given: dict[int, dict[int, float]] = field(default_factory=dict)


class PyramidLlama:
    """A Llama's weights, and what each layer holds."""

    def __init__(
        self, model: Any, *, decay: float, recent_ratio: float, sinks: int, min_context: int, distance_weight: float,
        interval: int = 1, protect: Sequence[int] = (), budget: int | None = None, decode_block: int | None = 16,
        decode_ratio: float = 0.9, decode_decay: float = 0.1,
    ) -> None:  # fmt: skip
        self.weights = {name: part.detach().double().numpy() for name, part in model.state_dict().items()}
        self.head = model.lm_head.weight.detach().double().numpy()
        self.frequencies = model.model.rotary_emb.inv_freq.double().numpy()
        self.config = model.config
        self.dim = model.model.layers[0].self_attn.head_dim
        self.schedule = {"decay": decay, "min_context": min_context, "interval": interval}
        self.recent_ratio, self.distance_weight, self.budget = recent_ratio, distance_weight, budget
        self.pinned = sorted({*range(sinks), *protect})
        self.block, self.block_shares = decode_block, (decode_ratio, decode_decay)
        self.settled = 0  # tokens that were decided on
        self.held = [Held() for _ in range(model.config.num_hidden_layers)]
        self.fed = 0

    @property
    def kept(self) -> list[list[int]]:
        """Token positions by layer."""
        return [list(layer.tokens) for layer in self.held]

    def prompt(self, ids: Sequence[int]) -> Array:
        """Feed a prompt segment; return the logits after its last token."""
        new = len(ids)
        limit = new if self.budget is None else min(new, self.budget)
        recent = min(limit, 1 + int(limit * self.recent_ratio))
        if self.budget is not None:
            recent = max(1, min(recent, self.budget - len(self.pinned)))
        pinned = [token for token in self.pinned if token < self.fed + new - recent]
        plan = planned(
            [len(layer.tokens) for layer in self.held], new - recent, pinned=len(pinned),
            mean_rows=None if self.budget is None else self.budget - recent, **self.schedule,
        )  # fmt: skip
        logits = self._run(ids, plan, recent, pinned)
        self.settled = self.fed
        for layer in self.held:
            layer.given = {}
        return logits

    def token(self, token_id: int) -> Array:
        """Feed one decode token; drop rows of a block that is now older than the recent tokens."""
        logits = self._run([token_id], None, 1, [])
        rows = len(self.held[0].tokens)
        recent = min(rows, 1 + int(rows * self.recent_ratio))
        if self.block is not None and self.fed - self.settled >= recent + self.block:
            for number in range(len(self.held)):
                self._decide_block(number)
            self.settled += self.block
        return logits

    def _decide_block(self, number: int) -> None:
        layer, (ratio, decay) = self.held[number], self.block_shares
        block = range(self.settled, self.settled + self.block)
        voters = range(block.stop, self.fed)
        weights = np.linspace(1.0, self.distance_weight, len(voters))
        votes = {t: np.mean([w * layer.given[v][t] for w, v in zip(weights, voters, strict=True)]) for t in block}
        share = ratio * ((1 - decay) * (cos(pi * number / len(self.held)) + 1) / 2 + decay)
        pinned = [token for token in block if token in self.pinned]
        rows = max(1, int(self.block * share), len(pinned))
        ranked = sorted(block, key=lambda token: (token not in pinned, -votes[token], token))
        gone = set(ranked[rows:])
        stay = [j for j, token in enumerate(layer.tokens) if token not in gone]
        layer.keys, layer.values = layer.keys[:, stay], layer.values[:, stay]
        layer.tokens = [layer.tokens[j] for j in stay]

    def _run(self, ids: Sequence[int], plan: list[int] | None, recent: int, pinned: list[int]) -> Array:
        hidden = self.weights["model.embed_tokens.weight"][list(ids)]
        reach = list(range(self.fed, self.fed + len(ids)))
        self.fed += len(ids)
        for number, layer in enumerate(self.held):
            hidden, attention = self._layer(number, hidden, reach)
            if plan is None:
                mean = attention[:, -1].mean(axis=0)
                layer.given[self.fed - 1] = dict(zip(layer.tokens, mean, strict=True))
                continue
            context = len(layer.tokens) - recent
            count = min(plan[number], context)
            if count == context:
                continue
            weight = np.linspace(1.0, self.distance_weight, recent)
            votes = (attention[:, -recent:, :context] * weight[None, :, None]).mean(axis=(0, 1))
            ranked = sorted(range(context), key=lambda j: (layer.tokens[j] not in pinned, -votes[j], j))
            stay = sorted(ranked[:count]) + list(range(context, len(layer.tokens)))
            layer.keys, layer.values = layer.keys[:, stay], layer.values[:, stay]
            layer.tokens = [layer.tokens[j] for j in stay]
            go_on = [i for i, token in enumerate(reach) if token in layer.tokens]
            hidden, reach = hidden[go_on], [reach[i] for i in go_on]
        return self.head @ self._norm(hidden[-1:], "model.norm.weight")[0]

    def _layer(self, number: int, hidden: Array, reach: list[int]) -> tuple[Array, Array]:
        """Run one layer over the tokens that reach it; return their states and attention [Q, T, n]."""
        name, layer = f"model.layers.{number}", self.held[number]
        states = self._norm(hidden, f"{name}.input_layernorm.weight")
        queries = self._rotated(self._heads(states, f"{name}.self_attn.q_proj.weight"), reach)
        keys = self._rotated(self._heads(states, f"{name}.self_attn.k_proj.weight"), reach)
        values = self._heads(states, f"{name}.self_attn.v_proj.weight")
        layer.keys = keys if layer.keys is None else np.concatenate([layer.keys, keys], axis=1)
        layer.values = values if layer.values is None else np.concatenate([layer.values, values], axis=1)
        layer.tokens = layer.tokens + reach
        group = queries.shape[0] // keys.shape[0]
        sees = np.array(layer.tokens)[None, :] <= np.array(reach)[:, None]
        attention, mixed = [], []
        for head in range(queries.shape[0]):
            logits = queries[head] @ layer.keys[head // group].T / np.sqrt(self.dim)
            weights = np.where(sees, np.exp(logits - logits.max(axis=1, keepdims=True)), 0.0)
            weights /= weights.sum(axis=1, keepdims=True)
            attention.append(weights)
            mixed.append(weights @ layer.values[head // group])
        joined = np.concatenate(mixed, axis=1) @ self.weights[f"{name}.self_attn.o_proj.weight"].T
        hidden = hidden + joined
        states = self._norm(hidden, f"{name}.post_attention_layernorm.weight")
        gate = states @ self.weights[f"{name}.mlp.gate_proj.weight"].T
        up = states @ self.weights[f"{name}.mlp.up_proj.weight"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * up) @ self.weights[f"{name}.mlp.down_proj.weight"].T
        return hidden, np.stack(attention)

    def _heads(self, states: Array, name: str) -> Array:
        projected = states @ self.weights[name].T
        return projected.reshape(len(states), -1, self.dim).transpose(1, 0, 2)

    def _rotated(self, heads: Array, tokens: Sequence[int]) -> Array:
        angles = np.outer(tokens, self.frequencies)
        first, second = heads[..., : self.dim // 2], heads[..., self.dim // 2 :]
        turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
        return np.concatenate(turned, axis=-1)

    def _norm(self, states: Array, name: str) -> Array:
        scale = np.sqrt((states**2).mean(axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return states / scale * self.weights[name]
