"""Cumulative Gumbel-softmax: attention logits with noise and a temperature that rises over decode.

Source: Adnan et al., "Keyformer: KV Cache Reduction through Key Tokens Selection for Efficient Generative Inference"
(arXiv 2403.09054): f_t[j] = f_{t-1}[j] + softmax((x_t + zeta_t) / tau_t)[j] with the temperature
tau_t = tau_init + t (tau_end - tau_init) / T.

The noise is a stateless function of (seed, layer, query head, query position, key position): no batch index and no
generator, so a padded row equals the row alone, beams agree, forks repeat, and sampling of tokens is left alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .carried import CarriedEvidence, QueryBlock, reduce_group
from .random import mix_bits, unit_interval

__all__ = ["GumbelSoftmax", "gumbel_noise"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GumbelSoftmax(CarriedEvidence):
    """Sum of Gumbel-softmax weights over queries, fp32. The model's own attention stays ordinary."""

    seed: int
    tau_init: float
    tau_end: float
    expected_steps: int
    after_end: str = "clamp"
    normalize: bool = False
    # The released code never lets a row become a key row after the prompt.
    freezes_keys: bool = False
    name: str = "gumbel_softmax"

    @property
    def channels(self) -> int:
        """The sum; the queries counted where rows compete by their mean; the key mark where keys are frozen."""
        return 1 + self.normalize + self.freezes_keys

    def temperature(self, clock_BT: Tensor) -> Tensor:
        """Return the temperature of each query, fp32."""
        rise = (self.tau_end - self.tau_init) / self.expected_steps
        steps = clock_BT.clamp(max=self.expected_steps) if self.after_end == "clamp" else clock_BT
        return self.tau_init + steps.float() * rise

    def observe_(self, state_BSNX: Tensor, block: QueryBlock, group: str) -> None:
        """Add the Gumbel-softmax weight each row received."""
        batch, stored, size, queries, rows = block.logits_BSGTN.shape
        tokens = block.row_tokens_BMN
        noise = gumbel_noise(self.seed, block.layer, stored * size, block.query_tokens_BT, tokens)
        noise_BSGTN = noise.view(batch, stored, size, queries, rows)
        tau = self.temperature(block.clock_BT)[:, None, None, :, None]
        # A sink is no row: it takes its share without noise.
        weights = block.weights(block.logits_BSGTN + noise_BSGTN, tau)
        if self.freezes_keys:
            # A new prompt chooses its keys afresh: marks of the one before must not outrank its scores.
            keeps_B = (block.clock_BT > 0).any(dim=1)
            if block.real_BT is not None:
                keeps_B = keeps_B | ~block.real_BT.any(dim=1)
            state_BSNX[..., -1] *= keeps_B.view(-1, 1, 1)
        state_BSNX[..., 0] += reduce_group(weights, group).sum(dim=2)
        if self.normalize:
            state_BSNX[..., 1] += block.seen_counts_BSN

    def scores(self, state_SNX: Tensor, tokens_MN: Tensor) -> Tensor:
        """Return the sums or means; frozen keys stand above every other row."""
        total = state_SNX[..., 0]
        if self.normalize:
            total = total / state_SNX[..., 1].clamp(min=1)
        return torch.where(state_SNX[..., -1] > 0, total + _ABOVE, total) if self.freezes_keys else total

    def close_prompt_(self, state_SNX: Tensor, recent_MN: Tensor) -> None:
        """Mark the rows chosen as keys: those that were not kept for being recent."""
        if self.freezes_keys:
            state_SNX[..., -1] = (~recent_MN).float()

    def describe(self) -> dict[str, Any]:
        """Return seed and schedule."""
        return {
            "seed": self.seed,
            "tau_init": self.tau_init,
            "tau_end": self.tau_end,
            "expected_steps": self.expected_steps,
            "after_end": self.after_end,
            "normalize": self.normalize,
            "freezes_keys": self.freezes_keys,
        }


# Larger than any sum of weights over a context that fits in memory; separates two classes, never compared within one.
_ABOVE = 1e12


def gumbel_noise(
    seed: int, layer: int | Tensor, query_heads: int, query_tokens_BT: Tensor, row_tokens_BMN: Tensor
) -> Tensor:
    """Return standard Gumbel noise -log(-log U), fp32 [B, Q, T, N]; each map head serves a contiguous query group.

    `layer` is one number, or one for each batch row.
    """
    device = query_tokens_BT.device
    heads = torch.arange(query_heads, device=device) + 1
    layer_B1 = torch.as_tensor(layer, device=device).view(-1, 1) + 1
    outer = mix_bits(mix_bits(heads + 0x10001 * layer_B1)[:, :, None] ^ mix_bits(query_tokens_BT + 1)[:, None])
    outer = mix_bits(outer ^ mix_bits(torch.tensor(seed, device=outer.device)))
    rows = mix_bits(row_tokens_BMN.long() + 0x5BD1E995)
    rows = rows.repeat_interleave(query_heads // rows.shape[1], dim=1)
    uniform = unit_interval(mix_bits(outer[..., None] ^ rows[:, :, None, :]))
    # Uniform values are multiples of 2^-24 moved off zero and one, where the logarithms end.
    return -torch.log(-torch.log(uniform * (1 - 2**-23) + 2**-24))
