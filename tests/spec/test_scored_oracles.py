"""snapkv and random on the real engine equal their oracles after prefill, every decode token and a second turn."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference import random as random_oracle
from reference import snapkv
from transformers import LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument
from hf_kvpolicy.evidence import hash_unit_reference

from ._models import captured, feed, kept, tiny_llama, tokens

# (prompt, decode tokens, second prompt, decode tokens)
TURNS = [(1, 2, 9, 1), (5, 4, 1, 1), (13, 3, 2, 2), (20, 6, 11, 2), (40, 2, 3, 1), (64, 1, 30, 1)]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_llama(layers=3)


def nothing(owners: int) -> list[list[list[int]]]:
    return [[[] for _ in range(owners)] for _ in range(3)]


def run_snapkv(model: LlamaForCausalLM, turn: tuple[int, int, int, int], owners: int = 2, **options: Any) -> None:
    cache = kv.SnapKVCache(model, **options)
    oracle = {name: value for name, value in options.items() if name not in ("owner", "merge_layers")}
    oracle |= {"pairs": cache.composition.pairs}
    held, fed = nothing(owners), 0
    with captured(model) as capture:
        for prompt, decode in (turn[:2], turn[2:]):
            feed(model, cache, tokens(prompt, seed=fed + 1))
            fed += prompt
            # A single token after the first prompt is a decode step, not a segment.
            if prompt == 1 and fed > 1:
                held = snapkv.after_decode(held, fed - 1)
            else:
                held = snapkv.after_segment(held, prompt, *capture.arrays(), **oracle)
            assert kept(cache) == held, f"after the segment ending at {fed}"
            for _ in range(decode):
                feed(model, cache, tokens(1, seed=fed + 1))
                held = snapkv.after_decode(held, fed)
                fed += 1
                assert kept(cache) == held, f"after the decode token ending at {fed}"
    assert cache.stored_rows(2).tolist() == [[len(held[0][0])] * owners]
    cache.check_integrity()


@pytest.mark.proves("kept_rows", policy="snapkv", family="llama")
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("unit", ["head", "layer", "token"])
def test_snapkv_lengths_and_budgets(model: LlamaForCausalLM, turn: tuple[int, int, int, int], unit: str) -> None:
    for budget, window in ((2, 1), (6, 2), (12, 8), (turn[0], 1), (turn[0] + 1, 4)):
        if budget > window:
            run_snapkv(model, turn, budget=budget, window=window, kernel_size=5, pooling="max", unit=unit)


@pytest.mark.parametrize(("kernel_size", "pooling"), [(1, "max"), (3, "avg"), (7, "max"), (7, "avg"), (31, "avg")])
def test_snapkv_kernels(model: LlamaForCausalLM, kernel_size: int, pooling: str) -> None:
    for turn in TURNS[2:]:
        run_snapkv(model, turn, budget=10, window=4, kernel_size=kernel_size, pooling=pooling)


@pytest.mark.parametrize("group", ["mean", "max", "sum"])
@pytest.mark.parametrize("unit", ["head", "layer", "token"])
def test_snapkv_groups(model: LlamaForCausalLM, group: str, unit: str) -> None:
    for turn in TURNS[2:]:
        run_snapkv(model, turn, budget=9, window=3, kernel_size=3, pooling="max", group=group, unit=unit)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("turn", TURNS[2:])
def test_snapkv_pairs_choose_together(model: LlamaForCausalLM, turn: tuple[int, int, int, int], start: int) -> None:
    """All rows are exceptions of merging; the layer without a partner chooses alone."""
    merge = {"start_layer": start, "retention": 1.0}
    for budget, window in ((6, 2), (12, 8)):
        run_snapkv(
            model, turn, budget=budget, window=window, kernel_size=5, pooling="max", unit="pair", merge_layers=merge
        )


@pytest.mark.parametrize("turn", TURNS)
def test_snapkv_rows_owned_by_query_heads(model: LlamaForCausalLM, turn: tuple[int, int, int, int]) -> None:
    run_snapkv(model, turn, owners=4, budget=8, window=3, kernel_size=3, pooling="max", owner="query_head")


@pytest.mark.parametrize("protect", [[0], [0, 1, 2], [4, 9], [17, 60]])
@pytest.mark.parametrize("unit", ["head", "layer", "token"])
def test_snapkv_protected_rows(model: LlamaForCausalLM, protect: list[int], unit: str) -> None:
    for turn in TURNS:
        budget = 3 + len(protect) + 2
        run_snapkv(model, turn, budget=budget, window=3, kernel_size=3, pooling="max", unit=unit, protect=protect)


def test_a_selection_is_not_trivial(model: LlamaForCausalLM) -> None:
    """The comparisons above would mean little if all owners always agreed or kept the newest rows."""
    cache = kv.SnapKVCache(model, budget=10, window=4, kernel_size=3)
    feed(model, cache, tokens(40))
    owners = {tuple(owner) for layer in kept(cache) for owner in layer}
    assert len(owners) == 6
    assert tuple(range(30, 40)) not in owners


@pytest.mark.proves("kept_rows", policy="random", family="llama")
@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("unit", ["head", "layer", "token"])
@pytest.mark.parametrize("protect", [[], [0, 9]])
def test_random(model: LlamaForCausalLM, turn: tuple[int, int, int, int], unit: str, protect: list[int]) -> None:
    for budget, window, seed in ((4, 1, 0), (7, 4, 1), (turn[0] + 3, 2, 2), (16, 8, 3)):
        options = {"budget": budget, "window": window, "seed": seed, "unit": unit, "protect": protect}
        if budget <= window + len(protect):
            continue
        cache = kv.RandomCache(model, **options)
        held, fed = nothing(2), 0
        for length in (turn[0], *[1] * turn[1], turn[2], *[1] * turn[3]):
            feed(model, cache, tokens(length, seed=fed + 1))
            fed += length
            if length == 1 and fed > 1:
                held = random_oracle.after_decode(held, fed - 1)
            else:
                held = random_oracle.after_segment(held, length, fed, hash_unit_reference, **options)
            assert kept(cache) == held, f"at {fed}"
        cache.check_integrity()


@pytest.mark.parametrize("policy", ["snapkv", "random"])
@pytest.mark.parametrize("unit", ["head", "layer", "token"])
def test_a_left_padded_batch_keeps_what_each_row_keeps_alone(model: LlamaForCausalLM, policy: str, unit: str) -> None:
    lengths = [3, 8, 9, 21, 30]
    options = {"budget": 8, "window": 3, "unit": unit}
    batch = kv.make_cache(policy, model, **options)
    width = max(lengths)
    ids, mask = torch.zeros(5, width + 6, dtype=torch.long), torch.ones(5, width + 6, dtype=torch.long)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = tokens(length + 6, seed=row)[0]
        mask[row, : width - length] = 0
    alone = [kv.make_cache(policy, model, **options) for _ in lengths]
    # Prompt, one decode token, a second prompt of four, one decode token.
    for start, stop in ((0, width), (width, width + 1), (width + 1, width + 5), (width + 5, width + 6)):
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, start:stop]
        with torch.inference_mode():
            model(
                ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=position_ids,
                **{cache_argument(): batch},
            )  # fmt: skip
        for row, length in enumerate(lengths):
            first = max(start, width - length)
            feed(model, alone[row], ids[row : row + 1, first:stop])
            assert kept(batch, row) == kept(alone[row]), f"row of {length} tokens at column {stop}"
    batch.check_integrity()


@pytest.mark.parametrize("unit", ["head", "layer", "token"])
@pytest.mark.parametrize("chunks", [[20, 20], [3, 30, 7], [39, 1, 1], [38, 2]])
def test_a_held_prompt_selects_as_one_prompt(model: LlamaForCausalLM, unit: str, chunks: list[int]) -> None:
    options = {"budget": 10, "window": 4, "kernel_size": 3, "unit": unit}
    ids = tokens(sum(chunks))
    held, whole = kv.SnapKVCache(model, chunked_prefill="hold", **options), kv.SnapKVCache(model, **options)
    at = 0
    for length in chunks:
        if length > 1:
            feed(model, held, ids[:, at : at + length])
            at += length
    held.finish_prefill()
    feed(model, whole, ids[:, :at])
    assert kept(held) == kept(whole)


def test_appending_keeps_the_old_rows_and_the_whole_new_segment(model: LlamaForCausalLM) -> None:
    """on_append='append': a later prompt segment is kept whole."""
    cache = kv.SnapKVCache(model, budget=10, window=4, kernel_size=3, on_append="append")
    feed(model, cache, tokens(24))
    first = kept(cache)
    state = cache.state.state_generation
    feed(model, cache, tokens(1, seed=2))
    feed(model, cache, tokens(15, seed=3))
    assert kept(cache) == [[[*owner, *range(24, 40)] for owner in layer] for layer in first]
    assert cache.state.state_generation == state


@pytest.mark.parametrize("policy", ["snapkv", "random"])
def test_appending_after_a_short_prompt_keeps_the_new_segment_whole(model: LlamaForCausalLM, policy: str) -> None:
    """As the papers' code: only the first prompt is ever compressed, also when it fitted."""
    cache = kv.make_cache(policy, model, budget=10, window=4, on_append="append")
    feed(model, cache, tokens(5))
    feed(model, cache, tokens(1, seed=2))
    feed(model, cache, tokens(15, seed=3))
    assert kept(cache) == [[list(range(21))] * 2] * 3


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("prompt", [3, 8, 33])
def test_a_ratio_is_fixed_by_the_first_prompt(model: LlamaForCausalLM, ratio: float, prompt: int) -> None:
    cache = kv.SnapKVCache(model, budget=ratio, window=2, kernel_size=3)
    feed(model, cache, tokens(prompt))
    rows = min(prompt, max(3, int(ratio * prompt)))
    assert cache.stored_rows(0).tolist() == [[rows] * 2]
    feed(model, cache, tokens(1, seed=2))
    feed(model, cache, tokens(40, seed=3))
    assert cache.stored_rows(0).tolist() == [[max(3, int(ratio * prompt))] * 2]
