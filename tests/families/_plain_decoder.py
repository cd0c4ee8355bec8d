"""MPT, Bloom and Falcon written out: token by token, head by head, over the rows each head is said to hold.

Shares nothing with the library. Attention, bias and grouping are plain loops over a model's own weights; slopes come
from the functions of transformers. Keys and values of every token ever fed are kept, so that any set of rows can be
asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import build_alibi_tensor as bloom_alibi
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb
from transformers.models.falcon.modeling_falcon import build_alibi_tensor as falcon_alibi
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

PLACES = 64
Kept = Sequence[Sequence[Sequence[int]]]  # [layer][owner] -> ascending token positions


class PlainDecoder:
    """One unpadded sequence through a model, with attention over given rows."""

    def __init__(self, model: Any) -> None:
        self.model, self.kind = model, str(model.config.model_type)
        decoder = model.transformer
        self.layers = list(decoder.blocks if self.kind == "mpt" else decoder.h)
        self.keys: list[dict[int, Tensor]] = [{} for _ in self.layers]
        self.values: list[dict[int, Tensor]] = [{} for _ in self.layers]
        # [layer][query token][query head] -> {row: attention}
        self.attention: list[dict[int, list[dict[int, float]]]] = [{} for _ in self.layers]
        self.fed = 0
        heads = model.config.num_attention_heads
        # What the model adds at a position, up to a number that is the same for all rows, [Q, place].
        self.bias = torch.stack([self._bias(head, heads) for head in range(heads)])

    @torch.no_grad()
    def feed(self, ids: Sequence[int], held: Kept, *, local: bool = False, passed: Kept | None = None) -> Tensor:
        """Return the logits [T, V] of new tokens that see the held rows and one another, causally.

        Args:
            held: rows of each layer's owners, before these tokens.
            local: number a query's rows without gaps instead of by their own positions.
            passed: the rows of each layer after these tokens; deeper layers compute only those of them.
        """
        at = list(range(self.fed, self.fed + len(ids)))
        hidden = {p: self._embedded(token) for p, token in zip(at, ids, strict=True)}
        for number, layer in enumerate(self.layers):
            if number and passed is not None:
                hidden = {p: state for p, state in hidden.items() if p in passed[number - 1][0]}
            hidden = self._layer(number, layer, hidden, held[number], local)
        self.fed += len(ids)
        norm = self.model.transformer.norm_f if self.kind == "mpt" else self.model.transformer.ln_f
        return torch.stack([self.model.lm_head(norm(state)) for state in hidden.values()])

    def _embedded(self, token: int) -> Tensor:
        decoder, index = self.model.transformer, torch.tensor(token)
        if self.kind == "mpt":
            return decoder.wte(index)
        state = decoder.word_embeddings(index)
        return decoder.word_embeddings_layernorm(state) if self.kind == "bloom" else state

    def _layer(
        self, number: int, layer: Any, hidden: dict[int, Tensor], held: Sequence[Sequence[int]], local: bool
    ) -> dict[int, Tensor]:
        after, queries = {}, {}
        for p, state in hidden.items():
            queries[p], self.keys[number][p], self.values[number][p] = self._projected(layer, state)
        for p, state in hidden.items():
            heads, own = queries[p].shape[0], [t for t in hidden if t <= p]
            context = []
            self.attention[number][p] = []
            for head in range(heads):
                rows = [*(held[head * len(held) // heads] if held else ()), *own]
                positions = list(range(len(rows))) if local else rows
                context.append(self._head(number, queries[p], head, heads, rows, positions))
            after[p] = self._finished(layer, state, torch.cat(context))
        return after

    def _head(
        self, number: int, query: Tensor, head: int, heads: int, rows: Sequence[int], positions: Sequence[int]
    ) -> Tensor:
        shared = head * self.keys[number][rows[0]].shape[0] // heads
        keys = torch.stack([self.keys[number][row][shared] for row in rows])
        values = torch.stack([self.values[number][row][shared] for row in rows])
        logits = self._turned(keys, positions) @ self._turned(query[head : head + 1], positions[-1:])[0]
        weights = (logits * self._scale() + self.bias[head, positions]).double().softmax(-1).float()
        self.attention[number][max(rows)].append(dict(zip(rows, weights.tolist(), strict=True)))
        return weights @ values

    def _turned(self, rows: Tensor, positions: Sequence[int]) -> Tensor:
        """Return rows [n, D] rotated to positions, in families that rotate."""
        if self.kind != "falcon" or self.model.config.alibi:
            return rows
        cos, sin = self.model.transformer.rotary_emb(rows[None], torch.tensor([list(positions)]))
        return apply_rotary_pos_emb(rows[None, None], rows[None, None], cos, sin)[0][0, 0]

    def _scale(self) -> float:
        if self.kind == "mpt":
            return self.model.config.attn_config.softmax_scale
        return (self.model.config.hidden_size // self.model.config.num_attention_heads) ** -0.5

    def _bias(self, head: int, heads: int) -> Tensor:
        if self.kind == "mpt":
            return build_mpt_alibi_tensor(heads, PLACES)[head, 0]
        mask = torch.ones(1, PLACES, dtype=torch.long)
        if self.kind == "bloom":
            return bloom_alibi(mask, heads, torch.float32)[head, 0]
        if not self.model.config.alibi:
            return torch.zeros(PLACES)
        return falcon_alibi(mask, heads, torch.float32)[head, 0] * self._scale()

    def _projected(self, layer: Any, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return query [Q, D], key and value [H, D] of one token, before any rotation."""
        config = self.model.config
        if self.kind == "mpt":
            clip = layer.attn.clip_qkv
            fused = layer.attn.Wqkv(layer.norm_1(state)).clamp(-clip, clip)
            query, key, value = fused.view(3, config.n_heads, -1)
            return query, key, value
        fused = layer.self_attention.query_key_value(self._normed(layer, state))
        heads = config.num_attention_heads
        if self.kind == "falcon" and config.new_decoder_architecture:
            parts = fused.view(config.num_kv_heads, heads // config.num_kv_heads + 2, -1)
            query, key, value = parts[:, :-2].flatten(0, 1), parts[:, -2], parts[:, -1]
        elif self.kind == "falcon" and config.multi_query:
            parts = fused.view(heads + 2, -1)
            query, key, value = parts[:heads], parts[heads : heads + 1], parts[heads + 1 :]
        else:
            query, key, value = fused.view(heads, 3, -1).unbind(1)
        return query, key, value

    def _normed(self, layer: Any, state: Tensor) -> Tensor:
        return layer.ln_attn(state) if hasattr(layer, "ln_attn") else layer.input_layernorm(state)

    def _finished(self, layer: Any, state: Tensor, context: Tensor) -> Tensor:
        if self.kind == "mpt":
            state = state + layer.attn.out_proj(context)
            return layer.ffn(layer.norm_2(state), state)
        attended = layer.self_attention.dense(context)
        if self.kind == "bloom":
            state = state + attended
            return layer.mlp(layer.post_attention_layernorm(state), state)
        if hasattr(layer, "post_attention_layernorm"):
            state = state + attended
            return state + layer.mlp(layer.post_attention_layernorm(state))
        normed = layer.ln_mlp(state) if hasattr(layer, "ln_mlp") else layer.input_layernorm(state)
        return state + layer.mlp(normed) + attended
