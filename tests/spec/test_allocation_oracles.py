"""pyramidkv, zigzagkv and adakv on the real engine equal their oracle over prompts, decode tokens and turns."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import adakv, pyramidkv, zigzagkv
from reference.owners import Kept
from transformers import LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.allocation import pyramid_reference_rows
from hf_kvpolicy.compat import cache_argument

from ._models import captured, feed, kept, tiny_llama, tokens

# (prompt, decode tokens, second prompt, decode tokens)
TURNS = [(5, 4, 1, 1), (13, 3, 2, 2), (20, 6, 11, 2), (40, 2, 3, 1), (64, 1, 30, 1)]
LAYERS = 3
ORACLES = {
    "pyramidkv": pyramidkv.after_segment,
    "zigzagkv": zigzagkv.after_segment,
    "adakv": adakv.after_segment,
}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("pyramidkv", {"beta": 20}),
    ("pyramidkv", {"beta": 1, "group": "max"}),
    ("pyramidkv", {"beta": 2.5, "unit": "layer"}),
    ("zigzagkv", {}),
    ("zigzagkv", {"mass": 0.5, "min_ratio": 0.0, "unit": "layer"}),
    ("adakv", {}),
    ("adakv", {"alpha": 1.0, "group": "sum"}),
    ("adakv", {"alpha": 0.0}),
    ("adakv", {"alpha": 0.8, "layers": "pyramid", "beta": 4}),
    ("adakv", {"alpha": 0.8, "evidence": "h2o"}),
    ("adakv", {"alpha": 0.6, "protect": [0, 1, 9]}),
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=LAYERS)


@pytest.mark.proves("kept_rows", family="llama")
@pytest.mark.parametrize("budget", [7, 10, 16, 41])
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0], *map(str, case[1].values())]))
def test_kept_positions(model: LlamaForCausalLM, case: Any, turn: tuple[int, int, int, int], budget: int) -> None:
    name, own = case
    options = {"budget": budget, "window": 3, "kernel_size": 3, **own}
    cache = kv.make_cache(name, model, **options)
    held: Kept = [[[], []] for _ in range(LAYERS)]
    fed = 0
    with captured(model) as capture:
        for prompt, decode in (turn[:2], turn[2:]):
            feed(model, cache, tokens(prompt, seed=fed + 1))
            fed += prompt
            if prompt == 1 and fed > 1:  # a decode token, not a segment
                held = [[[*owner, fed - 1] for owner in layer] for layer in held]
            else:
                held = ORACLES[name](held, prompt, *capture.arrays(), **options)
                total = sum(len(owner) for layer in held for owner in layer)
                assert total <= budget * LAYERS * 2, "the oracle itself keeps to the budget"
            assert kept(cache) == held, f"after the segment ending at {fed}"
            for _ in range(decode):
                feed(model, cache, tokens(1, seed=fed + 1))
                held = [[[*owner, fed] for owner in layer] for layer in held]
                fed += 1
                assert kept(cache) == held, f"after the decode token ending at {fed}"
    assert [cache.stored_rows(i).tolist()[0] for i in range(LAYERS)] == [[len(o) for o in layer] for layer in held]
    cache.check_integrity()


@pytest.mark.proves("ragged", family="llama")
@pytest.mark.parametrize("budget", [9, 16, 33])
@pytest.mark.parametrize("length", [34, 40, 77])
@pytest.mark.parametrize("name", ["pyramidkv", "zigzagkv", "adakv"])
def test_totals_are_exactly_the_budgets(model: LlamaForCausalLM, name: str, length: int, budget: int) -> None:
    cache = kv.make_cache(name, model, budget=budget, window=4)
    feed(model, cache, tokens(length))
    total = sum(int(cache.stored_rows(layer).sum()) for layer in range(LAYERS))
    assert total == min(budget, length) * LAYERS * 2
    assert cache.ledger().payload_rows == total


def test_owners_really_differ(model: LlamaForCausalLM) -> None:
    """The comparisons above would mean little if every owner kept equally many rows."""
    lengths = {}
    for name, own in (("pyramidkv", {"beta": 4}), ("zigzagkv", {}), ("adakv", {"alpha": 1.0})):
        cache = kv.make_cache(name, model, budget=12, window=3, kernel_size=1, **own)
        feed(model, cache, tokens(60))
        lengths[name] = [cache.stored_rows(layer)[0].tolist() for layer in range(LAYERS)]
    assert all(len({sum(layer) for layer in lengths[name]}) > 1 for name in ("pyramidkv", "zigzagkv"))
    assert any(len(set(layer)) > 1 for layer in lengths["adakv"])


def test_the_released_pyramid_reports_a_total_of_its_own(model: LlamaForCausalLM) -> None:
    cache = kv.PyramidKVCache(model, budget=12, window=3, beta=4, variant="reference")
    feed(model, cache, tokens(60))
    rows = [cache.stored_rows(layer)[0].tolist() for layer in range(LAYERS)]
    assert rows == [[n, n] for n in pyramid_reference_rows(12, 3, 4, LAYERS, 60)]
    assert cache.ledger().payload_rows == sum(map(sum, rows)) >= 12 * LAYERS * 2
    cache.check_integrity()


@pytest.mark.parametrize("name", ["pyramidkv", "zigzagkv", "adakv"])
def test_a_left_padded_batch_keeps_what_each_row_keeps_alone(model: LlamaForCausalLM, name: str) -> None:
    lengths, width = [3, 8, 21, 30], 30
    ids, mask = torch.zeros(4, width, dtype=torch.long), torch.ones(4, width, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = tokens(length, seed=row)[0]
        mask[row, : width - length] = 0
    batch = kv.make_cache(name, model, budget=8, window=3)
    with torch.inference_mode():
        model(ids, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **{cache_argument(): batch})
    for row, length in enumerate(lengths):
        alone = kv.make_cache(name, model, budget=8, window=3)
        feed(model, alone, tokens(length, seed=row))
        assert kept(batch, row) == kept(alone)
