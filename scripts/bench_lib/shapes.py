"""Shapes of models for a bench that loads nothing: random weights, made on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from script_lib.loading import DTYPES
from transformers import AutoModelForCausalLM, LlamaConfig

WINDOW_TOKENS = 32  # snapkv's and adakv's default; a budget must be larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A Llama's dimensions, and the cells that a bench of it measures."""

    name: str
    dimensions: Mapping[str, Any] = field(repr=False)
    dtype: str
    contexts: tuple[int, ...]
    budgets: tuple[int, ...]
    # Ascending from 1, each a multiple of the one before: caches are repeated from one to the next.
    batches: tuple[int, ...]
    rounds: int

    def __post_init__(self) -> None:
        """Refuse cells that cannot be measured.

        Raises:
            ValueError: batches do not build on one another, or a budget is not between the window and every context.
        """
        multiples = all(b % a == 0 and b > a for a, b in zip(self.batches, self.batches[1:], strict=False))
        if self.batches[:1] != (1,) or not multiples:
            raise ValueError(f"batches={self.batches} must ascend from 1, each a multiple of the one before.")
        if not WINDOW_TOKENS < min(self.budgets) <= max(self.budgets) < min(self.contexts):
            raise ValueError(
                f"budgets={self.budgets} must be above {WINDOW_TOKENS} rows and below contexts={self.contexts}."
            )


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            name="llama-8b",
            dimensions={
                "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
                "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
                "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
            },
            dtype="bfloat16",
            contexts=(32768, 65536, 131072),
            budgets=(1024, 4096),
            batches=(1, 8),
            rounds=8,
        ),
        Shape(
            name="tiny",
            dimensions={
                "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2,
            },
            dtype="float32",
            contexts=(512, 1024),
            budgets=(64, 128),
            batches=(1, 4),
            rounds=4,
        ),
    )
}  # fmt: skip


def random_model(shape: Shape, device: str, dtype: str) -> Any:
    """A Llama of this shape with transformers' own initialisation, made where it will run; nothing is downloaded."""
    torch.manual_seed(0)
    config = LlamaConfig(**shape.dimensions, max_position_embeddings=2 * max(shape.contexts))
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype]).eval()
