"""Retrofitting a small byte model to dynamic memory compression: relaxed decisions, their loss, and the training loop.

Nawrot et al., "Dynamic Memory Compression: Retrofitting LLMs for Accelerated Inference" (arXiv 2403.09636); section
0x0CD. While training, alpha is a Gumbel-sigmoid sample in [0, 1] and a token joins its segment in part:

    z_i = alpha_i z_(i-1) + omega_i,    k'_i = (alpha_i z_(i-1) k'_(i-1) + omega_i k_i) / z_i

All states are kept; a later query sees state j to the part 1 - alpha_(j+1), as log(1 - alpha_(j+1)) in its logit.

Letters: B batch rows, H KV heads, Q query heads, T tokens, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument, register_attention
from hf_kvpolicy.positions import RotarySpec, Shift, shift_keys

NAME = "dmc_training"
BYTES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Sizes and steps of one run."""

    hidden: int = 96
    intermediate: int = 256
    layers: int = 4
    query_heads: int = 4
    kv_heads: int = 2
    tokens: int = 256
    batch: int = 8
    teacher_steps: int = 1500
    retrofit_steps: int = 900
    teacher_rate: float = 4e-3
    retrofit_rate: float = 1.5e-3
    channel: int = 0
    offset: float = 5.0
    ratio: float = 2.0
    temperature: float = 0.1
    # Shares of the retrofit after which the channel is gone from attention, and the ramp of the ratio is done.
    zeroed_at: float = 0.15
    ramped_at: float = 0.7
    compression_weight: float = 3.0
    seed: int = 0


def byte_texts() -> tuple[Tensor, Tensor]:
    """Return the bytes of the running Python's help topics, int64: those to train on and those held out (a tenth)."""
    from pydoc_data.topics import topics

    text = "\n\n".join(str(topics[name]) for name in sorted(topics)).encode()
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    cut = data.shape[0] * 9 // 10
    return data[:cut], data[cut:]


def make_model(recipe: Recipe) -> LlamaForCausalLM:
    """Return a fresh model of bytes."""
    torch.manual_seed(recipe.seed)
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=recipe.hidden,
        intermediate_size=recipe.intermediate,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.query_heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=max(1024, recipe.tokens),
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.05,
    )
    return LlamaForCausalLM(config)


def compression_target(recipe: Recipe, step: int) -> float:
    """Return the ratio asked for at a step: it rises linearly from 1."""
    share = min(1.0, step / max(1, recipe.ramped_at * recipe.retrofit_steps))
    return 1.0 + share * (recipe.ratio - 1.0)


def compression_loss(mean_alpha: Tensor, ratio: float) -> Tensor:
    """max(0, appended share - 1 / ratio): one-sided, over all layers, heads and tokens together."""
    return functional.relu((1.0 - mean_alpha) - 1.0 / ratio)


class Relaxed:
    """What the training attention of a model's layers shares during one forward."""

    def __init__(self, model: LlamaForCausalLM, recipe: Recipe) -> None:
        self.recipe, self.hard = recipe, False
        # What is left of the deciding channel in attention, from 1 to 0.
        self.left = 0.0
        self.means: list[Tensor] = []
        self._rotary: Any = model.model.rotary_emb
        register_attention(NAME, self._attend, lambda *args, **kwargs: None)
        model.config._attn_implementation = NAME

    def take_mean_alpha(self) -> Tensor:
        """Return the mean decision of the last forward."""
        mean = torch.stack(self.means).mean()
        self.means = []
        return mean

    def decide(self, logits_BHT: Tensor) -> tuple[Tensor, Tensor]:
        """Return log alpha and log(1 - alpha); the first token begins."""
        if self.hard:
            x = torch.where(logits_BHT > 0, 60.0, -60.0)
        else:
            u = torch.rand_like(logits_BHT).clamp(1e-6, 1 - 1e-6)
            x = (logits_BHT + u.log() - (-u).log1p()) / self.recipe.temperature
        first = torch.arange(x.shape[-1], device=x.device) == 0
        x = torch.where(first, -60.0, x)
        return functional.logsigmoid(x), functional.logsigmoid(-x)

    def _attend(
        self, module: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        recipe, tokens = self.recipe, query.shape[2]
        spec = RotarySpec(inverse_frequencies=self._rotary.inv_freq)
        there = Shift.to_positions(torch.arange(tokens, device=query.device)[None], spec)
        query, keys = (shift_keys(part, there.undone(spec)) for part in (query, keys))
        batch, heads, _, dim = keys.shape
        kept = torch.ones(dim, device=query.device)
        kept[recipe.channel] = self.left
        importance = query[..., recipe.channel].view(batch, heads, -1, tokens).mean(2)
        omega_BHT = (importance + recipe.offset).sigmoid()
        log_in, log_out = self.decide(keys[..., recipe.channel] - recipe.offset)
        self.means.append(log_in.exp().mean())
        causal = torch.ones(tokens, tokens, dtype=torch.bool, device=query.device).tril()
        # What is left in state i of token j: the product of alpha after j.
        chain = log_in.cumsum(-1)
        share = (chain[..., :, None] - chain[..., None, :]).masked_fill(~causal, -math.inf).exp() * omega_BHT[
            ..., None, :
        ]
        share = share / share.sum(-1, keepdim=True)
        keys, values = shift_keys(share @ (keys * kept), there) * kept, share @ values
        query = shift_keys(query * kept, there) * kept
        hidden = functional.pad(log_out[..., 1:], (0, 1)).clamp(min=-1e4)[..., None, :].expand(-1, -1, tokens, -1)
        hidden = hidden.masked_fill(torch.eye(tokens, dtype=torch.bool, device=query.device), 0.0)
        bias = hidden.masked_fill(~causal, -math.inf).repeat_interleave(query.shape[1] // heads, dim=1)
        output = functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=bias, scale=scaling, enable_gqa=True
        )
        return output.transpose(1, 2), None


def batches(data: Tensor, recipe: Recipe, steps: int, seed: int) -> Iterator[Tensor]:
    """Yield random windows of the text, one byte longer than the model reads."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(0, data.shape[0] - recipe.tokens - 1, (recipe.batch,), generator=generator).tolist()
        yield torch.stack([data[start : start + recipe.tokens + 1] for start in starts])


def next_byte_loss(model: Any, window: Tensor) -> Tensor:
    """Return the mean negative log-likelihood in nats a byte."""
    logits = model(window[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())


def _rate(step: int, steps: int, peak: float) -> float:
    warm = min(1.0, (step + 1) / 50)
    return peak * warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))


def train(
    model: LlamaForCausalLM,
    data: Tensor,
    recipe: Recipe,
    *,
    steps: int,
    peak: float,
    seed: int,
    relaxed: Relaxed | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Train in place; with `relaxed` towards the recipe's compression."""
    rest = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [
        {"params": [weight for weight in model.parameters() if weight.ndim >= 2], "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95))
    model.train()
    for step, window in enumerate(batches(data, recipe, steps, seed)):
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps, peak)
        if relaxed is not None:
            relaxed.left = max(0.0, 1.0 - step / max(1, recipe.zeroed_at * steps))
        loss = total = next_byte_loss(model, window)
        note = ""
        if relaxed is not None:
            mean_alpha = relaxed.take_mean_alpha()
            total = loss + recipe.compression_weight * compression_loss(mean_alpha, compression_target(recipe, step))
            note = f", {1 / (1 - mean_alpha.item()):.2f} tokens a row"
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            say(f"step {step + 1} of {steps}: {loss.item():.3f} nats a byte{note}")
    model.eval()
    if relaxed is not None:
        relaxed.left = 0.0


def held_out(data: Tensor, recipe: Recipe) -> Iterator[Tensor]:
    """Yield all of a text in windows, in batches of equal size."""
    count = (data.shape[0] - 1) // recipe.tokens
    windows = torch.stack([data[i * recipe.tokens : (i + 1) * recipe.tokens + 1] for i in range(count)])
    yield from windows[: count // recipe.batch * recipe.batch].split(recipe.batch)


@torch.no_grad()
def evaluate_plain(model: Any, data: Tensor, recipe: Recipe) -> float:
    """Return nats a byte of an ordinary model on text in order."""
    losses = [next_byte_loss(model, window).item() for window in held_out(data, recipe)]
    return sum(losses) / len(losses)


@torch.no_grad()
def evaluate_cache(model: Any, data: Tensor, recipe: Recipe) -> tuple[float, float]:
    """Return (nats a byte, tokens a stored row) of a retrofitted model on the same text, through `DMCCache`."""
    losses, rows, tokens = [], 0, 0
    for window in held_out(data, recipe):
        cache = kv.DMCCache(model)
        logits = model(window[:, :-1], use_cache=True, **{cache_argument(): cache}).logits
        losses.append(functional.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten()).item())
        rows += sum(int(cache.stored_rows(layer).sum()) for layer in cache.policy_layers)
        tokens += window[:, :-1].numel() * cache.num_layers * cache.geometry.num_kv_heads
    return sum(losses) / len(losses), tokens / rows
