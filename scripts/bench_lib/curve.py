"""Decode time over a long decode: does a step at a fixed budget cost the same after thousands of steps?

A tiny random model, so that a step's own work shows and not the weights'. Every step runs each contender once, in an
order that rotates. transformers' own cache, cropped back after every step, is the control: it shows what the machine
did meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .models import POLICIES, forward, new_cache, stock_twin, stored_rows
from .report import Measure

CONTROL = "stock, constant"
PROMPT_TOKENS, ROWS, WARM_UP_STEPS = 256, 128, 20
# Of policies whose rows do not grow; the others attend over more rows every step.
FLAT_TARGET = 1.1


def tiny_model(device: str, positions: int) -> Any:
    """Return a random model of two layers that may be fed `positions` tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=positions,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(device)


def tenths(seconds: list[float]) -> list[float]:
    """Return the median of each tenth of a run, in ms."""
    size = len(seconds) // 10
    return [1e3 * statistics.median(seconds[i * size : (i + 1) * size]) for i in range(10)]


def step_seconds(model: Any, stock: Any, steps: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Decode with every policy and the control side by side; return the seconds of each step, and the caches."""
    caches = {name: new_cache(name, model, ROWS) for name in POLICIES} | {CONTROL: new_cache(None, stock, 0)}
    ids = torch.randint(3, 128, (1, PROMPT_TOKENS + WARM_UP_STEPS + steps), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    for name, cache in caches.items():
        forward(stock if name == CONTROL else model, ids[:, : ROWS if name == CONTROL else PROMPT_TOKENS], cache)
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    names = list(caches)
    for step in range(WARM_UP_STEPS + steps):
        token = ids[:, PROMPT_TOKENS + step : PROMPT_TOKENS + step + 1]
        turn = step % len(names)
        for name in names[turn:] + names[:turn]:
            begin = time.perf_counter()
            forward(stock if name == CONTROL else model, token, caches[name])
            taken = time.perf_counter() - begin
            if name == CONTROL:
                caches[name].crop(-1)
            if step >= WARM_UP_STEPS:
                seconds[name].append(taken)
    return seconds, caches


def curve_measures(device: str, steps: int) -> Iterator[Measure]:
    """ms/token of each tenth of a decode over the first tenth, and of the last one also over the control's."""
    model = tiny_model(device, PROMPT_TOKENS + WARM_UP_STEPS + steps)
    seconds, caches = step_seconds(model, stock_twin(model), steps)
    control = tenths(seconds[CONTROL])
    for name in (CONTROL, *POLICIES):
        ms = tenths(seconds[name])
        grows = name != CONTROL and stored_rows(caches[name], 2) > ROWS
        ratios = [value / ms[0] for value in ms]
        drift = 1.0 if name == CONTROL else control[-1] / control[0]
        details = {
            "tenths": " ".join(f"{ratio:.2f}" for ratio in ratios), "first ms": ms[0], "machine": drift,
            "steps": f"{steps:,}", "ms": ms, "ratios": ratios,
        }  # fmt: skip
        target = None if grows or name == CONTROL else FLAT_TARGET
        shown = f"{name}, grows" if grows else name
        yield Measure("last/first tenth", f"{shown}, {ROWS} rows", ratios[-1] / drift, "<=", target, details)
