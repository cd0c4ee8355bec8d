"""Decode of a policy that drops rows of its answer in blocks, over transformers' own cache that holds as many rows.

A random model of eight layers. The answer is already so long that blocks fall due: a measured run of tokens has two.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .models import forward, new_cache, stock_twin, stored_rows
from .report import Measure
from .timing import Contender, _ratio, interleaved

POLICY, PROMPT_TOKENS, WARM_UP_TOKENS, RUN_TOKENS = "pyramidinfer", 512, 192, 32
ANSWER_TARGET = 1.25


def random_layers(device: str, dtype: torch.dtype) -> Any:
    """Return a random model of eight layers, each of SmolLM2-135M's shape."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=576, intermediate_size=1536, num_hidden_layers=8, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(device, dtype)


def _decode(model: Any, cache: Any, ids: torch.Tensor) -> None:
    for step in range(ids.shape[1]):
        forward(model, ids[:, step : step + 1], cache)


def answer_measures(device: str, dtype: torch.dtype, batches: Sequence[int], rounds: int) -> Iterator[Measure]:
    """Decode time, CPU time on a CPU, over that of transformers' own cache at the mean rows of the run."""
    model = random_layers(device, dtype)
    stock, layers = stock_twin(model), model.config.num_hidden_layers
    clock = time.process_time if device == "cpu" else time.perf_counter
    for batch in batches:
        total = PROMPT_TOKENS + WARM_UP_TOKENS + RUN_TOKENS
        ids = torch.randint(3, 512, (batch, total), generator=torch.Generator().manual_seed(0)).to(device)
        cache = new_cache(POLICY, model, 0)
        forward(model, ids[:, :PROMPT_TOKENS], cache)
        _decode(model, cache, ids[:, PROMPT_TOKENS:-RUN_TOKENS])
        run, ended = ids[:, -RUN_TOKENS:], cache.fork()
        _decode(model, ended, run)
        rows = (stored_rows(cache, layers) + stored_rows(ended, layers)) / 2
        full = new_cache(None, stock, 0)
        forward(stock, ids[:, : round(rows) - RUN_TOKENS // 2], full)

        def policy(cache: Any = cache, run: torch.Tensor = run) -> Callable[[], None]:
            fork = cache.fork()
            return lambda: _decode(model, fork, run)

        def stock_run(full: Any = full, rows: float = rows, run: torch.Tensor = run) -> Callable[[], None]:
            full.crop(min(0, round(rows) - RUN_TOKENS // 2 - full.get_seq_length()))
            return lambda: _decode(stock, full, run)

        seconds = interleaved([Contender(POLICY, policy), Contender("stock", stock_run)], rounds, clock)
        value, details = _ratio(seconds[POLICY], seconds["stock"], 1e3 / RUN_TOKENS)
        name = f"{POLICY}, {round(rows)} rows in the mean, 8 layers, batch {batch}"
        yield Measure("answer ms/token", name, value, "<=", ANSWER_TARGET, details)
