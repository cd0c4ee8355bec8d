"""headkv on the real engine: the worked numbers of 0x08G, its oracle over prompts and turns, exact totals."""

from __future__ import annotations

from typing import Any

import pytest
from reference import headkv
from transformers import LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.allocation import head_reference_rows

from ._models import captured, feed, kept, tiny_llama, tokens

LAYERS, HEADS = 3, 2
WORKED = [[0.05, 0.35], [0.25, 0.10], [0.20, 0.05]]
STEEP = [[1000.0, 0.0], [3.0, 0.0], [0.0, 0.5]]
# (prompt, decode tokens, second prompt, decode tokens)
TURNS = [(5, 4, 1, 1), (13, 3, 2, 2), (20, 6, 11, 2), (40, 2, 3, 1), (64, 1, 30, 1)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=LAYERS)


def lengths(cache: Any) -> list[list[int]]:
    return [cache.stored_rows(layer)[0].tolist() for layer in range(LAYERS)]


def test_the_worked_numbers(model: LlamaForCausalLM) -> None:
    """b = 2 and beta = 2 give [1, 3, 3, 2, 2, 1]; layers hold [4, 5, 3], not the pyramid's [6, 4, 2]."""
    cache = kv.HeadKVCache(model, budget=2 + 3, window=3, beta=2, profile=WORKED)
    feed(model, cache, tokens(60))
    rows = [[count - 3 for count in layer] for layer in lengths(cache)]
    assert rows == [[1, 3], [3, 2], [2, 1]]
    assert [sum(layer) for layer in rows] == [4, 5, 3]


@pytest.mark.proves("kept_rows", policy="headkv", family="llama")
@pytest.mark.parametrize(
    "own",
    [
        {"profile": WORKED, "beta": 2},
        {"profile": STEEP, "beta": 1},
        {"profile": STEEP, "beta": 1.005, "group": "max", "pooling": "avg"},
        {"profile": [[0.0, 1.0]] * 3, "beta": 1.5, "protect": [0, 1, 9]},
    ],
)
@pytest.mark.parametrize("turn", TURNS)
def test_kept_positions(model: LlamaForCausalLM, own: dict[str, Any], turn: tuple[int, int, int, int]) -> None:
    for budget in (7, 10, 16, 41):
        options = {"budget": budget, "window": 3, "kernel_size": 3, **own}
        cache = kv.HeadKVCache(model, **options)
        held: headkv.Kept = [[[], []] for _ in range(LAYERS)]
        fed = 0
        with captured(model) as capture:
            for prompt, decode in (turn[:2], turn[2:]):
                feed(model, cache, tokens(prompt, seed=fed + 1))
                fed += prompt
                if prompt == 1 and fed > 1:  # a decode token, not a segment
                    held = [[[*owner, fed - 1] for owner in layer] for layer in held]
                else:
                    held = headkv.after_segment(held, prompt, *capture.arrays(), **options)
                assert kept(cache) == held, f"budget {budget}, after the segment ending at {fed}"
                for _ in range(decode):
                    feed(model, cache, tokens(1, seed=fed + 1))
                    held = [[[*owner, fed] for owner in layer] for layer in held]
                    fed += 1
        assert kept(cache) == held
        cache.check_integrity()


@pytest.mark.proves("ragged", policy="headkv", family="llama")
@pytest.mark.parametrize("profile", [WORKED, STEEP, "uniform"], ids=["worked", "steep", "uniform"])
@pytest.mark.parametrize("beta", [1, 1.01, 1.5, 10])
def test_totals_are_exactly_the_budgets(model: LlamaForCausalLM, profile: Any, beta: float) -> None:
    """Whether heads can fill their shares (long prompts) or not (short ones), and however targets round."""
    for budget in (9, 16, 33):
        for length in (34, 40, 150):
            cache = kv.HeadKVCache(model, budget=budget, window=4, beta=beta, profile=profile)
            feed(model, cache, tokens(length))
            assert cache.ledger().payload_rows == sum(map(sum, lengths(cache))) == budget * LAYERS * HEADS
            assert max(map(max, lengths(cache))) <= length


def test_a_head_that_cannot_fill_its_share_passes_it_on(model: LlamaForCausalLM) -> None:
    cache = kv.HeadKVCache(model, budget=10, window=3, beta=1, profile=[[1.0, 0.0]] + [[0.0, 0.0]] * 2)
    feed(model, cache, tokens(20))
    # 42 rows beside the windows: 17 fit into the first head, 25 go to five heads that asked for none.
    assert lengths(cache) == [[20, 8], [8, 8], [8, 8]]


def test_a_smaller_beta_means_a_larger_pool(model: LlamaForCausalLM) -> None:
    spread = []
    for beta in (1, 2, 10):
        cache = kv.HeadKVCache(model, budget=20, window=4, beta=beta, profile=WORKED)
        feed(model, cache, tokens(150))
        rows = [count for layer in lengths(cache) for count in layer]
        spread.append(max(rows) - min(rows))
    assert spread == sorted(spread, reverse=True)
    assert spread[-1] < spread[0]


def test_importances_of_query_heads_add_up_to_those_of_kv_heads(model: LlamaForCausalLM) -> None:
    by_query = [[0.05, 0.0, 0.3, 0.05], [0.05, 0.2, 0.1, 0.0], [0.1, 0.1, 0.05, 0.0]]
    caches = [kv.HeadKVCache(model, budget=20, window=3, beta=1, profile=table) for table in (WORKED, by_query)]
    for cache in caches:
        feed(model, cache, tokens(150))
    assert lengths(caches[0]) == lengths(caches[1])


def test_the_released_rounding_reports_a_total_of_its_own(model: LlamaForCausalLM) -> None:
    cache = kv.HeadKVCache(model, budget=12, window=3, beta=1.5, profile=STEEP, variant="reference")
    feed(model, cache, tokens(30))
    expected = head_reference_rows([v for layer in STEEP for v in layer], 12, 3, 1.5, 30)
    assert [count for layer in lengths(cache) for count in layer] == expected
    assert cache.ledger().payload_rows == sum(expected) < 12 * LAYERS * HEADS
    cache.check_integrity()


def test_rows_move_between_layers_and_heads(model: LlamaForCausalLM) -> None:
    """The comparisons above would mean little if every owner kept equally many rows."""
    cache = kv.HeadKVCache(model, budget=20, window=3, profile=WORKED)
    feed(model, cache, tokens(150))
    assert len({sum(layer) for layer in lengths(cache)}) == 3
    assert all(first != second for first, second in lengths(cache))
