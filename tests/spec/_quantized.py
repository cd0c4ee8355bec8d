"""Quantized caches of every policy on tiny models, for tests of what they hold."""

from __future__ import annotations

from typing import Any

from helpers import forward, prompt

import hf_kvpolicy as kv

BLOCK = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "snapkv": {"budget": 24, "window": 4, "kernel_size": 3},
    "random": {"budget": 24, "window": 4},
    "sliding_window": {"budget": 24},
    "streaming_llm": {"budget": 24, "sinks": 3, "protect": [9, 45]},
    "h2o": {"budget": 24, "recent_ratio": 0.25},
    "keyformer": {"budget": 24, "recent_ratio": 0.25},
    "scissorhands": {"budget": 24, "recent": 4, "history": 12},
    "adakv": {"budget": 24, "window": 4, "kernel_size": 3, "alpha": 0.8},
    "pyramidkv": {"budget": 24, "window": 4, "kernel_size": 3, "beta": 4},
    "headkv": {"budget": 24, "window": 4, "kernel_size": 3, "profile": [[1.0, 6.0], [3.0, 0.0]]},
    "zigzagkv": {"budget": 24, "window": 4, "kernel_size": 3},
    "fastgen": {"budget": 24, "recovery": 0.7, "sinks": 2, "punctuation_token_ids": range(20, 32)},
    "pyramidinfer": {"budget": 24, "decay": 0.6, "sinks": 2, "min_context": 2, "decode_block": 3, "decode_ratio": 0.5},
}
UNITS = [("h2o", {"unit": "layer"}), ("h2o", {"unit": "token"}), ("snapkv", {"owner": "query_head"})]
RAGGED = ("adakv", "pyramidkv", "headkv", "zigzagkv", "fastgen", "pyramidinfer")
# Policies that a budget binds only when a prompt ends.
UNBOUNDED = ("snapkv", "random")
CASES = [*((name, {}) for name in OPTIONS), *UNITS]


def quantized(name: str, model: Any, bits: str = "int8", **options: Any) -> Any:
    return kv.make_cache(name, model, **OPTIONS[name] | options | {"quantize": bits, "block_rows": BLOCK})


def rows_of(cache: Any) -> tuple[Any, ...]:
    snapshot = cache._runtime.snapshot
    return snapshot.rows or tuple(layer.rows for layer in snapshot.ragged)


def accept(cache: Any, model: Any, width: int, step: int) -> None:
    """Feed a draft of which one token is rejected."""
    cache.activate_past_recording()
    forward(model, prompt(width + 1, step), cache)
    cache.crop(-1)
    cache.set_recording(False)
