"""StreamingLLM with cache-local positions against keys kept before rotation and rotated by slot."""

from __future__ import annotations

import copy

import pytest
import torch
from reference.slot_positions import SlotPositionLlama
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument

CONFIG = LlamaConfig(
    vocab_size=97,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
)


@pytest.fixture
def model() -> LlamaForCausalLM:
    torch.manual_seed(11)
    return LlamaForCausalLM(copy.deepcopy(CONFIG)).eval()


def _tokens(count: int, seed: int = 5) -> torch.Tensor:
    return torch.randint(1, 97, (1, count), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def _feed(model: LlamaForCausalLM, cache: kv.PolicyCache, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, **{cache_argument(): cache}, use_cache=True).logits[0]


@pytest.mark.proves("cache_local", policy="streaming_llm", family="llama")
@pytest.mark.parametrize(("budget", "sinks", "prompt"), [(64, 4, 300), (64, 4, 20), (16, 1, 3), (9, 4, 1), (12, 0, 40)])
def test_equals_slot_positions_over_500_steps(model: LlamaForCausalLM, budget: int, sinks: int, prompt: int) -> None:
    reference = SlotPositionLlama(copy.deepcopy(model), budget, sinks)
    cache = kv.StreamingLLMCache(model, budget=budget, sinks=sinks)
    ids = _tokens(prompt + 500)
    worst = (_feed(model, cache, ids[:, :prompt]) - reference.feed(ids[:, :prompt])).abs().max()
    for step in range(prompt, prompt + 500):
        token = ids[:, step : step + 1]
        worst = torch.maximum(worst, (_feed(model, cache, token) - reference.feed(token)).abs().max())
    assert worst <= 1e-4
    assert cache.get_seq_length() == prompt + 500
    recent = list(range(prompt + 500 - (budget - sinks), prompt + 500))
    assert cache.positions(1)[0].tolist() == list(range(sinks)) + recent


def test_a_later_turn_continues(model: LlamaForCausalLM) -> None:
    reference = SlotPositionLlama(copy.deepcopy(model), 32, 4)
    cache = kv.StreamingLLMCache(model, budget=32)
    ids, start = _tokens(400), 0
    for length in (100, 1, 1, 17, 1, 60, 1, 1, 5):
        turn = ids[:, start : start + length]
        torch.testing.assert_close(_feed(model, cache, turn), reference.feed(turn), atol=1e-4, rtol=0)
        start += length
    cache.check_integrity()


def test_bf16_is_as_close_to_fp32_as_the_slot_reference(model: LlamaForCausalLM) -> None:
    exact = SlotPositionLlama(copy.deepcopy(model), 32, 4)
    half = copy.deepcopy(model).to(torch.bfloat16)
    reference = SlotPositionLlama(copy.deepcopy(half), 32, 4)
    cache = kv.StreamingLLMCache(half, budget=32)
    ids = _tokens(160)
    ours, theirs = [], []
    for start, stop in [(0, 60), *((i, i + 1) for i in range(60, 160))]:
        truth = exact.feed(ids[:, start:stop])
        ours.append((_feed(half, cache, ids[:, start:stop]).float() - truth).pow(2).mean())
        theirs.append((reference.feed(ids[:, start:stop]).float() - truth).pow(2).mean())
    distance, allowed = torch.stack(ours).mean().sqrt(), torch.stack(theirs).mean().sqrt()
    print(f"bf16 distance to fp32: library {distance:.2e}, slot reference {allowed:.2e}")
    assert distance <= 2 * allowed


def test_scattered_protected_rows_keep_local_positions(model: LlamaForCausalLM) -> None:
    """In one layer, logits equal dense attention over the kept tokens numbered without gaps."""
    one = LlamaForCausalLM(LlamaConfig(**{**CONFIG.to_dict(), "num_hidden_layers": 1})).eval()
    cache = kv.StreamingLLMCache(one, budget=16, sinks=2, protect=[10, 11, 25])
    ids = _tokens(80)
    _feed(one, cache, ids[:, :30])
    for step in range(30, 79):
        kept = [*cache.positions(0)[0].tolist(), step]
        got = _feed(one, cache, ids[:, step : step + 1])[-1]
        with torch.inference_mode():
            dense = one(ids[:, kept]).logits[0, -1]
        torch.testing.assert_close(got, dense, atol=1e-5, rtol=0)
    assert {0, 1, 10, 11, 25} <= set(cache.positions(0)[0].tolist())


def test_batch_rows_of_unequal_length_equal_the_rows_alone(model: LlamaForCausalLM) -> None:
    lengths, width = (3, 40, 12), 40
    rows = [_tokens(n + 40, seed=n) for n in lengths]
    padded = torch.zeros((3, width), dtype=torch.long)
    mask = torch.zeros((3, width), dtype=torch.long)
    for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
        padded[i, width - n :], mask[i, width - n :] = row[0, :n], 1
    batch = kv.StreamingLLMCache(model, budget=12, sinks=4, protect=[20])
    alone = [kv.StreamingLLMCache(model, budget=12, sinks=4, protect=[20]) for _ in rows]
    ids = padded
    for step in range(40):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.inference_mode():
            out = model(
                ids, attention_mask=mask, position_ids=positions, **{cache_argument(): batch}, use_cache=True
            ).logits[:, -1]
        for i, (row, n) in enumerate(zip(rows, lengths, strict=True)):
            piece = row[:, :n] if step == 0 else row[:, n + step - 1 : n + step]
            torch.testing.assert_close(out[i], _feed(model, alone[i], piece)[-1], atol=2e-5, rtol=0)
            assert batch.positions(2, batch=i)[0].tolist() == alone[i].positions(2)[0].tolist()
        ids = torch.stack([row[0, n + step : n + step + 1] for row, n in zip(rows, lengths, strict=True)])
        mask = torch.cat([mask, torch.ones((3, 1), dtype=torch.long)], dim=1)
    batch.check_integrity()
