"""Rows in int8 and int4: decode over the same policy in full precision, and bytes right after a long prompt.

A random model of eight layers; nothing is downloaded. Bytes are those of a bf16 model, whatever dtype is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

import hf_kvpolicy as kv

from .answer import random_layers
from .memory import formula_bytes
from .models import forward
from .report import Measure
from .timing import BLOCK_TOKENS, Contender, _decode_block, _ratio, interleaved

POLICIES, ROWS, PROMPT_TOKENS = ("snapkv", "streaming_llm", "h2o"), 512, 1024
PRECISIONS = ("int8", "int4")
PLAIN, TARGETS = "as they are", {("snapkv", "int8"): 1.3}
LONG_PROMPT_TOKENS, BYTES_TARGET = 4096, 1 / 18


def _filled(policy: str, model: Any, ids: torch.Tensor, quantize: str | None) -> Any:
    cache = kv.make_cache(policy, model, budget=ROWS, quantize=quantize)
    forward(model, ids, cache)
    return cache


def _contender(name: str, model: Any, cache: Any, ids: torch.Tensor) -> Contender:
    def prepare() -> Callable[[], None]:
        fork = cache.fork()
        return lambda: _decode_block(model, fork, ids)

    return Contender(name, prepare)


def quantized_measures(device: str, dtype: torch.dtype, batches: Sequence[int], rounds: int) -> Iterator[Measure]:
    """ms/token of policies with rows in few bits over the same with rows as they are; then bytes of the smallest."""
    model = random_layers(device, dtype)
    for batch in batches:
        ids = torch.randint(3, 512, (batch, PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).to(device)
        for policy in POLICIES:
            caches = {PLAIN: _filled(policy, model, ids, None)}
            caches |= {quantize: _filled(policy, model, ids, quantize) for quantize in PRECISIONS}
            seconds = interleaved([_contender(name, model, cache, ids) for name, cache in caches.items()], rounds)
            for quantize in PRECISIONS:
                value, details = _ratio(seconds[quantize], seconds[PLAIN], 1e3 / BLOCK_TOKENS)
                name, target = f"{policy}, {ROWS} rows, {quantize}, batch {batch}", TARGETS.get((policy, quantize))
                yield Measure("quantized ms/token", name, value, "<=", target, details)
    yield _bytes_measure(random_layers(device, torch.bfloat16))


def _bytes_measure(model: Any) -> Measure:
    """Bytes that int4 snapkv holds right after a long prompt, slack apart, over a full cache in bf16."""
    ids = torch.randint(3, 512, (1, LONG_PROMPT_TOKENS), generator=torch.Generator().manual_seed(0)).to(model.device)
    ledger = _filled("snapkv", model, ids, "int4").ledger()
    held_bytes = ledger.measured_bytes - ledger.slack_bytes
    full_bytes = formula_bytes(model, 1, LONG_PROMPT_TOKENS)
    details = {
        "payload": ledger.payload_bytes, "positions and rest": held_bytes - ledger.payload_bytes,
        "slack": ledger.slack_bytes, "full cache": full_bytes, "times smaller": full_bytes / held_bytes,
    }  # fmt: skip
    name = f"snapkv, {ROWS} rows, int4, context {LONG_PROMPT_TOKENS}, bf16"
    return Measure("quantized bytes over full", name, held_bytes / full_bytes, "<=", BYTES_TARGET, details)
