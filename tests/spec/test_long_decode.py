"""Thousands of decode steps at a fixed budget: bytes stay flat, carried scores stay those of a float64 twin.

2,000 steps; KVPOLICY_LONG_STEPS=20000 runs as many as the contract speaks of (a minute or more for each case).

The twin is the plain oracle of the method. It accumulates from captured queries and keys, and drops the rows the cache
drops: what is compared is the arithmetic over a long run, not the choice, which other tests compare.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from reference.h2o import H2O
from reference.keyformer import Keyformer
from reference.scissorhands import Scissorhands
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.evidence import gumbel_noise

from ._models import VOCAB, Capture, captured, feed, kept, tokens

STEPS, PROMPT, EVERY = int(os.environ.get("KVPOLICY_LONG_STEPS", "2000")), 24, 400
WARM_UP = 400
BUDGET = 12
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "h2o": ("h2o", {}),
    "keyformer": ("keyformer", {}),
    "keyformer_normalized": ("keyformer", {"normalize": True}),
    "scissorhands": ("scissorhands", {"history": 32, "recent": 2}),
}


def smallest_llama() -> LlamaForCausalLM:
    """One layer, two query heads, one KV head."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, initializer_range=0.3, max_position_embeddings=2 * STEPS,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def noise(layer: int, query_heads: list[int], query: int, rows: list[int]) -> np.ndarray:
    """The library's noise, an input of the oracle."""
    found = gumbel_noise(0, layer, len(query_heads), torch.tensor([[query]]), torch.tensor([[rows]]))
    return found[0, :, 0].double().numpy()


def twin_of(policy: str, options: dict[str, Any]) -> Any:
    if policy == "h2o":
        return H2O(1, 1, budget=BUDGET, **options)
    if policy == "keyformer":
        return Keyformer(1, 1, noise, budget=BUDGET, **options)
    return Scissorhands(1, 1, budget=BUDGET, **options)


def step(model: Any, cache: Any, twin: Any, capture: Capture, count: int, seed: int) -> None:
    feed(model, cache, tokens(count, seed=seed))
    twin.append(*capture.arrays())
    twin.publish(kept(cache))
    capture.queries.clear()
    capture.keys.clear()


def carried(cache: Any) -> dict[int, torch.Tensor]:
    """Return the state of each live row by its token position."""
    snapshot = cache._runtime.snapshot
    table, states = snapshot.full_map(0), snapshot.scores_LBSWX[0, 0, 0]
    slots = table.live_BMW[0, 0].nonzero()[:, 0].tolist()
    return {int(table.tokens_BMW[0, 0, slot]): states[slot] for slot in slots}


def compare(cache: Any, twin: Any) -> None:
    states, owner = carried(cache), twin.owners[0][0]
    assert sorted(states) == owner.rows
    if isinstance(twin, Scissorhands):
        history = slice(-twin.history, None)
        for row, bits in states.items():
            counted = sum(int(byte).bit_count() for byte in bits)
            expected, unsure = (sum(q.get(row, 0) for q in each[history]) for each in (owner.low, owner.unsure))
            assert abs(counted - expected) <= unsure
        return
    for row, score, seen in zip(owner.rows, owner.score, owner.seen, strict=True):
        assert states[row][0].item() == pytest.approx(score, rel=1e-4)
        if len(states[row]) > 1:
            assert states[row][1].item() == seen


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_twenty_thousand_steps(name: str) -> None:
    policy, options = CASES[name]
    model = smallest_llama()
    cache, twin = kv.make_cache(policy, model, budget=BUDGET, **options), twin_of(policy, options)
    # What is held for a number of rows: a policy that drops several rows at once goes up and down.
    sizes: dict[int, tuple[int, int]] = {}
    with captured(model) as capture:
        step(model, cache, twin, capture, PROMPT, seed=0)
        for number in range(1, STEPS + 1):
            step(model, cache, twin, capture, 1, seed=number)
            if number < WARM_UP or number % EVERY < 2 * BUDGET:
                ledger = cache.ledger()
                size = (ledger.measured_bytes, ledger.slack_bytes)
                assert number < WARM_UP or ledger.payload_rows in sizes
                assert number < WARM_UP // 2 or sizes.setdefault(ledger.payload_rows, size) == size, number
                assert ledger.declared_bytes == ledger.measured_bytes
            if number % EVERY == 0:
                compare(cache, twin)
    compare(cache, twin)
    cache.check_integrity()
    assert cache.get_seq_length() == PROMPT + STEPS
    assert int(cache.stored_rows(0).max()) <= BUDGET
