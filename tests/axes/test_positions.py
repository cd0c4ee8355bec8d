"""Moving rotated keys, and numbering rows inside the cache."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hf_kvpolicy.positions import RotarySpec, Shift, local_shift, local_shift_reference, shift_keys


def frequencies(rotated: int, base: float = 10000.0) -> Tensor:
    return 1.0 / base ** (torch.arange(0, rotated, 2, dtype=torch.float64) / rotated)


def rotate_at(keys_BSPD: Tensor, positions_BP: Tensor, rotated: int) -> Tensor:
    """Plain rope in float64, channel by channel: pair (c, c + R/2) turns by position * frequency."""
    out = keys_BSPD.double().clone()
    half = rotated // 2
    for c, frequency in enumerate(frequencies(rotated)):
        angle = positions_BP.double()[:, None, :] * frequency
        a, b = keys_BSPD[..., c].double(), keys_BSPD[..., c + half].double()
        out[..., c] = a * angle.cos() - b * angle.sin()
        out[..., c + half] = a * angle.sin() + b * angle.cos()
    return out


@pytest.mark.parametrize(("dim", "rotated"), [(2, 2), (8, 8), (64, 64), (8, 2), (80, 32)])
@pytest.mark.parametrize("largest", [10, 4096, 100_000])
def test_a_shifted_key_is_the_key_rotated_at_the_other_position(dim: int, rotated: int, largest: int) -> None:
    keys = torch.randn(2, 3, 5, dim)
    start = torch.randint(0, largest, (2, 5))
    shift = torch.randint(0, largest, (2, 5))
    spec = RotarySpec(inverse_frequencies=frequencies(rotated))
    assert spec.rotated_channels == rotated
    stored = rotate_at(keys, start, rotated).float()
    moved = shift_keys(stored, Shift.of(shift, spec))
    torch.testing.assert_close(moved.double(), rotate_at(keys, start + shift, rotated), rtol=0, atol=2e-6)
    assert torch.equal(moved[..., rotated:], stored[..., rotated:]), "channels without rotation pass through untouched"


@pytest.mark.parametrize(("dim", "rotated"), [(8, 8), (8, 4)])
def test_there_and_back_again(dim: int, rotated: int) -> None:
    keys, shift = torch.randn(2, 3, 4, dim), torch.randint(-9999, 9999, (2, 4))
    spec = RotarySpec(inverse_frequencies=frequencies(rotated))
    back = shift_keys(shift_keys(keys, Shift.of(shift, spec)), Shift.of(-shift, spec))
    torch.testing.assert_close(back, keys, rtol=0, atol=1e-6)
    still = shift_keys(keys, Shift.of(torch.zeros_like(shift), spec))
    assert torch.equal(still, keys), "a shift by zero changes no bit"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    spec = RotarySpec(inverse_frequencies=frequencies(4).float())
    moved = shift_keys(torch.randn(1, 1, 2, 8).to(dtype), Shift.of(torch.tensor([[3, 4]]), spec))
    assert moved.dtype == dtype


@pytest.mark.parametrize("theta", [10000.0, 500000.0])
def test_agrees_with_the_rotation_of_transformers(theta: float) -> None:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": theta}
    )
    rope = LlamaRotaryEmbedding(config)
    keys, start, shift = torch.randn(1, 2, 6, 8), torch.arange(6)[None], torch.tensor([[0, 1, 5, 100, 900, 2000]])

    def at(positions: Tensor) -> Tensor:
        return apply_rotary_pos_emb(keys, keys, *rope(keys, positions))[1]

    moved = shift_keys(at(start), Shift.of(shift, RotarySpec(inverse_frequencies=rope.inv_freq)))
    torch.testing.assert_close(moved, at(start + shift), rtol=0, atol=5e-4)


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[list[int]], int, list[list[int]], list[list[bool]]]:
    """Batch rows of held tokens; pinned slots first, the rest in any slot order, some slots dead."""
    pinned = draw(st.integers(0, 4))
    width = pinned + draw(st.integers(1, 8))
    held, slots, live = [], [], []
    for _ in range(draw(st.integers(1, 3))):
        tokens = draw(st.lists(st.integers(0, 60), min_size=width, max_size=width, unique=True))
        tokens[:pinned] = sorted(tokens[:pinned])
        flags = draw(st.lists(st.booleans(), min_size=width, max_size=width))
        held.append([t for t, flag in zip(tokens, flags, strict=True) if flag])
        slots.append(tokens)
        live.append(flags)
    return held, pinned, slots, live


@given(caches(), st.integers(0, 9))
@settings(deadline=None, max_examples=400, derandomize=True)
def test_local_shift_equals_the_reference(
    cache: tuple[list[list[int]], int, list[list[int]], list[list[bool]]], ahead: int
) -> None:
    held, pinned, slots, live = cache
    queries = [max(row, default=-1) + 1 + ahead for row in held]
    got = local_shift(torch.tensor(slots, dtype=torch.int32), torch.tensor(live), pinned, torch.tensor(queries))
    assert got.shape == (len(slots), pinned)
    assert got.dtype == torch.int64
    for row, tokens in enumerate(slots):
        expected = local_shift_reference(held[row], queries[row])
        for slot in range(pinned):
            assert got[row, slot].item() == (expected[tokens[slot]] if live[row][slot] else 0)


@given(st.integers(0, 6), st.integers(1, 8), st.integers(0, 80), st.lists(st.integers(0, 80), max_size=3))
@settings(deadline=None, max_examples=200, derandomize=True)
def test_rows_of_the_run_before_the_query_do_not_move(sinks: int, recent: int, query: int, protect: list[int]) -> None:
    held = {t for t in [*range(sinks), *protect, *range(query - recent, query)] if 0 <= t < query}
    shifts = local_shift_reference(sorted(held), query)
    for token in range(query - 1, -1, -1):
        if token not in held:
            break
        assert shifts[token] == 0
    local = sorted(token + shift for token, shift in shifts.items())
    assert local == list(range(query - len(held), query)), "rows are numbered without gaps, ending before the query"
