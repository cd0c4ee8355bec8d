"""Votes of the observation window against the plain reference, against full eager attention, and under padding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.evidence import GROUPS, WindowVotes, pool_reference, window_votes_reference

from ._observations import observation

CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def evidence(window: int, kernel_size: int = 1, pooling: str = "max") -> WindowVotes:
    return WindowVotes(window_queries=window, kernel_size=kernel_size, pooling=pooling)  # type: ignore[arg-type]


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(("kv_heads", "group_size"), [(1, 1), (2, 1), (2, 2), (1, 5), (3, 3)])
@pytest.mark.parametrize("window", [1, 2, 7, 400])
def test_votes_equal_the_reference(group: str, kv_heads: int, group_size: int, window: int) -> None:
    for tokens in [*range(1, 12), 63, 64, 300]:
        queries, keys = torch.randn(1, kv_heads * group_size, tokens, 4), torch.randn(1, kv_heads, tokens, 4)
        seen = observation(queries, keys, window, scaling=0.7)
        votes = evidence(window).votes(seen, group=group, score_heads=kv_heads)
        expected = window_votes_reference(queries[0], keys[0], window=window, group=group, scaling=0.7)
        torch.testing.assert_close(votes[0], expected, **CLOSE)


def test_every_query_hands_out_exactly_one_vote() -> None:
    seen = observation(torch.randn(2, 4, 20, 8) * 9, torch.randn(2, 2, 20, 8) * 9, 6)
    votes = evidence(6).votes(seen, group="mean", score_heads=2)
    torch.testing.assert_close(votes.sum(-1), torch.full((2, 2), 6.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_votes_are_float32_and_do_not_saturate(dtype: torch.dtype) -> None:
    # All queries vote for row 0: a half-precision sum of 4096 ones would stop growing at 2048.
    queries, keys = torch.ones(1, 1, 4097, 2, dtype=dtype), torch.zeros(1, 1, 4097, 2, dtype=dtype)
    keys[:, :, 0] = 100
    votes = evidence(4096).votes(observation(queries, keys, 4096), group="mean", score_heads=1)
    assert votes.dtype == torch.float32
    assert votes[0, 0, 0].item() == pytest.approx(4096)


@pytest.mark.parametrize("group_size", [1, 2, 3])
def test_query_head_owners_get_votes_of_their_own(group_size: int) -> None:
    queries, keys = torch.randn(1, 2 * group_size, 17, 4), torch.randn(1, 2, 17, 4)
    seen = observation(queries, keys, 5)
    own = evidence(5).votes(seen, group="mean", score_heads=2 * group_size)
    assert own.shape == (1, 2 * group_size, 17)
    for head in range(2 * group_size):
        kv_head = head // group_size
        alone = window_votes_reference(
            queries[0, head : head + 1], keys[0, kv_head : kv_head + 1], window=5, group="sum", scaling=1.0
        )
        torch.testing.assert_close(own[0, head], alone[0], **CLOSE)
    for group in GROUPS:
        shared = evidence(5).votes(seen, group=group, score_heads=2).view(2, -1)
        reduced = {"mean": own.view(2, group_size, -1).mean(1), "max": own.view(2, group_size, -1).amax(1)}
        torch.testing.assert_close(shared, reduced.get(group, own.view(2, group_size, -1).sum(1)), **CLOSE)


@pytest.mark.parametrize("window", [1, 3, 8, 40])
@pytest.mark.parametrize("score_heads", [2, 4])
def test_a_left_padded_row_votes_as_it_does_alone(window: int, score_heads: int) -> None:
    lengths, columns = [1, 2, 7, 12, 13], 13
    queries, keys = torch.randn(5, 4, columns, 4), torch.randn(5, 2, columns, 4)
    pads = [columns - n for n in lengths]
    for row, pad in enumerate(pads):  # what a pad computes is garbage; large garbage must change nothing
        queries[row, :, :pad], keys[row, :, :pad] = 1e4, -1e4
    seen = observation(queries, keys, window, pads=pads)
    votes = evidence(window).votes(seen, group="mean", score_heads=score_heads)
    assert torch.isfinite(votes).all()
    for row, pad in enumerate(pads):
        assert not votes[row, :, :pad].any(), "a pad received a vote"
        alone = observation(queries[row : row + 1, :, pad:], keys[row : row + 1, :, pad:], window)
        expected = evidence(window).votes(alone, group="mean", score_heads=score_heads)
        torch.testing.assert_close(votes[row, :, pad:], expected[0], **CLOSE)
        assert votes[row].sum().item() == pytest.approx(score_heads * min(window, lengths[row]), rel=1e-5)


def test_visibility_may_differ_by_head() -> None:
    queries, keys = torch.randn(1, 4, 6, 4), torch.randn(1, 2, 6, 4)
    seen = observation(queries, keys, 2)
    mask = seen.visibility()
    assert mask is not None
    per_head = mask.repeat(1, 2, 1, 1)
    per_head[:, 0, :, 1] = False
    narrowed = type(seen)(**{name: getattr(seen, name) for name in seen.__slots__} | {"visibility": lambda: per_head})
    votes = evidence(2).votes(narrowed, group="mean", score_heads=2)
    assert votes[0, 0, 1] == 0
    assert votes[0, 1, 1] > 0
    torch.testing.assert_close(votes[0, 1], evidence(2).votes(seen, group="mean", score_heads=2)[0, 1])


def tiny(family: str) -> tuple[torch.nn.Module, int | None]:
    shape = {
        "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.3,
        "attn_implementation": "eager",
    }  # fmt: skip
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**shape)).eval(), None
    window = 9 if family == "mistral_sliding" else None
    return MistralForCausalLM(MistralConfig(**shape, sliding_window=window)).eval(), window


def post_rotation(module: torch.nn.Module, kwargs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Recompute a layer's rotated queries and keys from its input."""
    hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
    out = []
    for projection in (module.q_proj, module.k_proj):
        heads = projection(hidden).view(*hidden.shape[:2], -1, module.head_dim).transpose(1, 2)
        first, second = heads.chunk(2, dim=-1)
        out.append(heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None])
    return out[0], out[1]


@pytest.mark.parametrize("family", ["llama", "mistral", "mistral_sliding"])
def test_votes_equal_full_eager_attention(family: str) -> None:
    model, model_window = tiny(family)
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda module, args, kwargs: layers.append(post_rotation(module, kwargs)), with_kwargs=True
        )
    with torch.no_grad():
        attentions = model(torch.randint(3, 97, (2, 24)), output_attentions=True, use_cache=False).attentions
    for (queries, keys), attention in zip(layers, attentions, strict=True):
        for window in (1, 5, 24):
            seen = observation(queries, keys, window, scaling=queries.shape[-1] ** -0.5, model_window=model_window)
            votes = evidence(window).votes(seen, group="mean", score_heads=2)
            expected = attention[:, :, -window:].sum(2).view(2, 2, 2, 24).mean(2)
            torch.testing.assert_close(votes, expected, rtol=1e-4, atol=1e-5)


@given(
    st.lists(st.floats(0, 50, width=32), min_size=1, max_size=40),
    st.sampled_from([1, 3, 5, 7, 9, 31]),
    st.sampled_from(["max", "avg"]),
)
@settings(deadline=None, max_examples=300, derandomize=True)
def test_pooling_equals_the_reference(votes: list[float], kernel_size: int, pooling: str) -> None:
    refined = evidence(1, kernel_size, pooling).refine(torch.tensor(votes).view(1, 1, -1))
    assert refined.shape == (1, 1, len(votes))
    expected = pool_reference(votes, kernel_size, pooling)  # type: ignore[arg-type]
    torch.testing.assert_close(refined[0, 0], torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pooling", ["max", "avg"])
def test_equal_votes_stay_equal_away_from_the_edges(pooling: str) -> None:
    refined = evidence(1, 5, pooling).refine(torch.ones(1, 2, 9))
    assert (refined[:, :, 2:-2] == 1).all()


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 2}, {"kernel_size": 6}, {"kernel_size": 0}, {"kernel_size": -3},
        {"window_queries": 0}, {"window_queries": -1}, {"pooling": "mean"},
    ],
)  # fmt: skip
def test_what_cannot_keep_the_length_is_refused(options: dict) -> None:
    with pytest.raises(ConfigError):
        WindowVotes(**{"window_queries": 4, "kernel_size": 3, "pooling": "max", **options})
