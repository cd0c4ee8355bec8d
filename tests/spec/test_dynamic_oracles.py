"""h2o, scissorhands and keyformer on the real engine keep what their oracles keep, forward after forward.

The oracles read the queries and keys of the very run under test. Where a kept set differs, the oracle must call the
scores too close to tell (a relative gap below 1e-6); it then follows the engine, so later choices stay comparable.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Sequence
from functools import cache as memo
from typing import Any

import numpy as np
import pytest
import torch
from reference.h2o import H2O
from reference.keyformer import Keyformer
from reference.scissorhands import Scissorhands
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument
from hf_kvpolicy.errors import SelectionError
from hf_kvpolicy.evidence import gumbel_noise

from ._models import captured, feed, kept, tokens

LAYERS = 2
POLICIES = ("h2o", "scissorhands", "keyformer")
UNITS = ("head", "layer", "token")
VARIANTS = ("paper", "reference")
# Small budgets, so that every prompt is cut; Scissorhands' history is shorter than what it holds.
SMALL: dict[str, dict[str, Any]] = {
    "h2o": {"budget": 20, "recent_ratio": 0.25},
    "scissorhands": {"budget": 20, "history": 10, "recent": 4, "drop_ratio": 0.2},
    "keyformer": {"budget": 20, "recent_ratio": 0.3, "expected_steps": 60, "seed": 3},
}


@memo
def llama(kv_heads: int, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Six query heads. Wide weights, so that attention is far from uniform."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=48, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=6,
        num_key_value_heads=kv_heads, head_dim=8, initializer_range=0.3, max_position_embeddings=1024,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to(dtype)


def to_bfloat16(weights: np.ndarray) -> np.ndarray:
    return torch.from_numpy(weights).float().bfloat16().double().numpy()


@memo
def noise_table(seed: int) -> np.ndarray:
    """The library's noise, an input of the oracle: [layer, query head, query, key]."""
    every = torch.arange(240)[None]
    return np.stack([gumbel_noise(seed, layer, 6, every, every[None])[0].double().numpy() for layer in range(LAYERS)])


def oracle_of(policy: str, kv_heads: int, seed: int = 0, **options: Any) -> Any:
    if policy == "h2o":
        return H2O(LAYERS, kv_heads, **options)
    if policy == "scissorhands":
        return Scissorhands(LAYERS, kv_heads, **options)
    table = noise_table(seed)
    return Keyformer(LAYERS, kv_heads, lambda i, heads, query, rows: table[i, heads, query][:, rows], **options)


class Run:
    """One sequence fed to a cache and, from its captured queries and keys, to the oracle."""

    def __init__(self, policy: str, kv_heads: int, *, dtype: torch.dtype = torch.float32, **options: Any) -> None:
        self.model = llama(kv_heads, dtype)
        self.cache = kv.make_cache(policy, self.model, **options)
        for name in ("chunked_prefill", "merge_layers"):
            options.pop(name, None)
        extra = {"cast": to_bfloat16, "tolerance": 8e-6} if dtype is torch.bfloat16 and policy == "h2o" else {}
        self.oracle = oracle_of(policy, kv_heads, **options, **extra)
        self.fed = self.excused = self.compared = self.dropped = self.windows = 0

    def forward(self, length: int) -> None:
        with captured(self.model) as seen:
            feed(self.model, self.cache, tokens(length, seed=self.fed + 1))
        queries, keys = seen.arrays()
        self.fed += length
        self.oracle.append(queries, keys)
        expected, actual = self.oracle.choose(), kept(self.cache)
        self.compared += 1
        if actual != expected:
            assert self.oracle.excuses(actual), f"at {self.fed}: {actual} instead of {expected}"
            self.excused += 1
        self.dropped += len(self.oracle.owners[0][0].rows) - len(actual[0][0])
        self.windows += all(owner == list(range(owner[0], self.fed)) for layer in actual for owner in layer)
        self.oracle.publish(actual)

    def forwards(self, lengths: Sequence[int]) -> Run:
        for length in lengths:
            self.forward(length)
        # Everything may be excused somewhere, but hardly anything may be.
        assert self.excused <= 1 + self.compared // 100
        self.cache.check_integrity()
        return self


# -- two hundred steps ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [6, 3], ids=["mha", "gqa"])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_two_hundred_decode_steps(policy: str, variant: str, unit: str, kv_heads: int) -> None:
    run = Run(policy, kv_heads, **SMALL[policy], variant=variant, unit=unit).forwards([33, *[1] * 200])
    assert run.dropped == 233 - len(kept(run.cache)[0][0]) > 200
    sets = {tuple(owner) for layer in kept(run.cache) for owner in layer}
    assert len(sets) == {"head": LAYERS * kv_heads, "layer": LAYERS, "token": 1}[unit], "owners chose alike by chance"
    assert run.windows < 40, "the newest rows would have done"


# -- turns and options ------------------------------------------------------------------------------------------------


@pytest.mark.proves("kept_rows", family="llama")
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_turns(policy: str, variant: str, unit: str) -> None:
    """Old rows keep their scores, and the new prompt's queries add to them; a prompt shorter than the budget too."""
    Run(policy, 3, **SMALL[policy], variant=variant, unit=unit).forwards([30, 1, 1, 1, 17, 1, 1, 1, 1, 2, 1, 3, 1])


@pytest.mark.parametrize("policy", POLICIES)
def test_two_layers_that_share_rows_choose_together(policy: str) -> None:
    """All rows are exceptions of merging, so that scores are those of the rows themselves."""
    merge = {"start_layer": 0, "retention": 1.0}
    run = Run(policy, 3, **SMALL[policy], unit="pair", merge_layers=merge)
    run.forwards([30, 1, 1, 1, 17, *[1] * 20, 2, 1])
    lower, deeper = kept(run.cache)
    assert lower == deeper
    assert len({tuple(owner) for owner in lower}) == 3, "heads choose for themselves"


@pytest.mark.parametrize("first", [1, 2, 7, 19, 20, 21])
@pytest.mark.parametrize("policy", POLICIES)
def test_short_prompts(policy: str, first: int) -> None:
    """Below the budget nothing is dropped; the row that exceeds it starts the selection."""
    run = Run(policy, 3, **SMALL[policy])
    for length in [first, *[1] * (20 - first)]:
        run.forward(length)
        assert bool(run.dropped) == (run.fed > 20)
    run.forwards([*[1] * 12, 6, 1, 1])
    assert run.dropped


def drawn_options(policy: str, draw: random.Random) -> dict[str, Any]:
    options: dict[str, Any] = {
        "budget": draw.randint(12, 26), "group": draw.choice(["mean", "max", "sum"]), "unit": draw.choice(UNITS),
        "protect": draw.choice([(), (0,), (0, 1, 5), (28, 31)]), "grace": draw.choice([0, 0, 1, 3, 6]),
        "variant": draw.choice(["paper", "paper", "reference"]),
    }  # fmt: skip
    if policy == "scissorhands":
        drop_ratio, recent = draw.choice([0.0, 0.1, 0.3, 0.4]), draw.randint(0, 4)
        return options | {"history": draw.choice([1, 7, 8, 9, 24, 400]), "recent": recent, "drop_ratio": drop_ratio}
    options |= {"recent_ratio": draw.choice([0.0, 0.1, 0.29, 0.5, 0.6]), "normalize": draw.random() < 0.4}
    if policy == "keyformer":
        tau_init, tau_end = draw.choice([(1.0, 2.0), (0.5, 3.0), (2.0, 1.0), (1.0, 1.0)])
        options |= {"tau_init": tau_init, "tau_end": tau_end, "seed": draw.randint(0, 2**31)}
        options |= {"expected_steps": draw.choice([1, 5, 100]), "after_end": draw.choice(["clamp", "continue"])}
    return options


@pytest.mark.parametrize("number", range(16))
@pytest.mark.parametrize("policy", POLICIES)
def test_options(policy: str, number: int) -> None:
    draw = random.Random(f"{policy} {number}")
    options = drawn_options(policy, draw)
    first, second = draw.choice([3, 27, 34]), draw.choice([2, 9, 30])
    lengths = [first, *[1] * draw.randint(3, 14), second, *[1] * draw.randint(3, 14)]
    Run(policy, draw.choice([1, 2, 3, 6]), **options).forwards(lengths)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_budget_is_never_exceeded(policy: str) -> None:
    run = Run(policy, 3, **SMALL[policy])
    for length in (50, *[1] * 25, 13, *[1] * 25):
        run.forward(length)
        rows = run.cache.stored_rows(0)
        assert rows.max() == rows.min() <= 20
        assert policy == "scissorhands" or rows.max() == 20


def test_scissorhands_drops_a_batch_at_once() -> None:
    run = Run("scissorhands", 3, budget=20, recent=4, drop_ratio=0.4)  # the default history sees every query
    counts = []
    for length in (33, *[1] * 20):
        run.forward(length)
        counts.append(int(run.cache.stored_rows(0)[0, 0]))
    assert counts == [20, *range(13, 21), *range(13, 21), *range(13, 17)]


# -- what the variants change -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_half_precision(policy: str, variant: str) -> None:
    """bf16: the paper's sum is fp32; H2O's released code rounds each probability to the model's dtype first."""
    run = Run(policy, 3, dtype=torch.bfloat16, **SMALL[policy], variant=variant).forwards([33, *[1] * 50, 20, 1, 1])
    assert run.dropped


def test_keyformers_released_code_freezes_its_keys_at_the_end_of_the_prompt() -> None:
    run = Run("keyformer", 3, **SMALL["keyformer"], variant="reference")
    run.forward(33)
    frozen = [[owner[:14] for owner in layer] for layer in kept(run.cache)]
    for _ in range(80):
        run.forward(1)
        expected = [[[*owner, *range(run.fed - 6, run.fed)] for owner in layer] for layer in frozen]
        assert kept(run.cache) == expected
    run.forward(25)
    again = [[owner[:14] for owner in layer] for layer in kept(run.cache)]
    assert again != frozen
    run.forwards([1] * 10)
    assert [[owner[:14] for owner in layer] for layer in kept(run.cache)] == again


# -- broken activations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_a_score_that_is_no_number_never_costs_a_protected_row(policy: str) -> None:
    """A NaN in decode is refused as it is in a prompt, or the newest rows stay in spite of it."""
    model = llama(3)
    cache = kv.make_cache(policy, model, **SMALL[policy])
    feed(model, cache, tokens(33))
    before, fed = kept(cache), 33
    broken = model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: args[2] * float("nan"))
    try:
        for _ in range(4):
            try:
                feed(model, cache, tokens(1, seed=fed))
            except SelectionError:
                assert kept(cache) == before
                return
            fed += 1
            assert all(owner[-4:] == list(range(fed - 4, fed)) for layer in kept(cache) for owner in layer)
    finally:
        broken.remove()


# -- batches ----------------------------------------------------------------------------------------------------------


def batched(
    policy: str, real: Sequence[Sequence[int]], widths: Sequence[int], right: bool = False, **options: Any
) -> None:
    """Feed a padded batch, and each of its rows alone; `real` has each row's real tokens of every forward."""
    model = llama(3)
    batch = kv.make_cache(policy, model, **options)
    alone = [kv.make_cache(policy, model, **options) for _ in real]
    mask = torch.zeros(len(real), 0, dtype=torch.long)
    for number, width in enumerate(widths):
        ids = tokens(width, batch=len(real), seed=number)
        new = torch.zeros_like(ids)
        for row, counts in enumerate(real):
            new[row, slice(0, counts[number]) if right else slice(width - counts[number], width)] = 1
        mask = torch.cat([mask, new], dim=1)
        position_ids = (mask.cumsum(1) - 1).clamp(min=0)[:, -width:]
        with torch.inference_mode():
            model(ids, attention_mask=mask, position_ids=position_ids, **{cache_argument(): batch})
        for row, cache in enumerate(alone):
            if new[row].any():
                feed(model, cache, ids[row : row + 1, new[row].bool()])
            assert kept(batch, row) == kept(cache), f"row {row} after forward {number}"
    batch.check_integrity()


def left_padded(policy: str, lengths: Sequence[int], steps: Sequence[int], **options: Any) -> None:
    batched(policy, [[length, *steps] for length in lengths], [max(lengths), *steps], **options)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_left_padded_batch_keeps_what_each_row_keeps_alone(policy: str, variant: str, unit: str) -> None:
    """Rows far below, at and above the budget of 20; a second prompt; decode on both sides of it."""
    steps = [*[1] * 4, 6, *[1] * 4]
    left_padded(policy, [3, 12, 20, 22, 41], steps, **SMALL[policy], variant=variant, unit=unit)


@pytest.mark.parametrize("unit", ["head", "token"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_row_may_pause_and_come_back(policy: str, unit: str) -> None:
    """A finished row is fed pads: its rows, clock and history stand still, until it is given a new prompt."""
    steps = [1] * 6
    real = [[24, *steps, 5, 1, 1], [30, 1, 1, 0, 0, 0, 0, 8, 1, 1], [9, 1, 0, 0, 1, 1, 1, 3, 1, 0]]
    batched(policy, real, [30, *steps, 8, 1, 1], **SMALL[policy], unit=unit)


@pytest.mark.parametrize("policy", POLICIES)
def test_pads_may_come_last(policy: str) -> None:
    """More pads at the end of a segment than the history is long."""
    real = [[30, 1, 1, 4, 1, 1], [12, 1, 1, 20, 1, 1], [21, 1, 1, 9, 1, 1]]
    batched(policy, real, [30, 1, 1, 20, 1, 1], right=True, **SMALL[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_ratio_budget_is_resolved_per_batch_row(policy: str) -> None:
    options = {**SMALL[policy], "budget": 0.5, **({"recent": 2} if policy == "scissorhands" else {})}
    left_padded(policy, [16, 22, 41], [*[1] * 5, 7, 1, 1], **options)


@pytest.mark.parametrize("policy", POLICIES)
def test_protected_rows_are_token_positions_of_each_row(policy: str) -> None:
    left_padded(policy, [9, 24, 41], [*[1] * 4, 6, 1, 1], **SMALL[policy], protect=[0, 3, 8], grace=2)


@pytest.mark.parametrize("unit", ["head", "token"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_held_prompt_selects_as_one_prompt(policy: str, unit: str) -> None:
    model, options, ids = llama(3), {**SMALL[policy], "unit": unit}, tokens(44)
    held = kv.make_cache(policy, model, chunked_prefill="hold", **options)
    whole = kv.make_cache(policy, model, **options)
    for start, stop in ((0, 20), (20, 23), (23, 44)):
        feed(model, held, ids[:, start:stop])
    held.finish_prefill()
    feed(model, whole, ids)
    assert kept(held) == kept(whole)
    for at in range(6):
        for cache in (held, whole):
            feed(model, cache, tokens(1, seed=at))
        assert kept(held) == kept(whole)


@pytest.mark.parametrize("policy", POLICIES)
def test_bounded_chunks_are_segments(policy: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Run(policy, 3, **SMALL[policy], chunked_prefill="bounded").forwards([20, 9, 15, 1, 1])
