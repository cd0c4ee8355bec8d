"""Worked example of 0x07: votes to packed rows, the first decode append, byte ledgers of both owners."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from reference import snapkv
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.allocation import parse_budget
from hf_kvpolicy.engine import Composition
from hf_kvpolicy.evidence import LayerObservation, WindowVotes
from hf_kvpolicy.selection import keep_best, kept_index
from hf_kvpolicy.storage import pack_rows

from ._models import everywhere, feed, kept, tiny_llama, tokens

VOTE = [0.175, 0.125, 1.000, 0.150]
POOLED = [0.100000, 0.433333, 0.425000, 0.383333]
# [layer][KV head]; the first is printed. The other three owners' table is lost: position 3 survives only in (1, 0).
VOTES = [[VOTE, [0.900, 0.200, 0.100, 0.050]], [[0.050, 0.100, 0.200, 0.900], [0.300, 0.800, 0.100, 0.050]]]
PACKED = [[[1, 2, 4, 5], [0, 1, 4, 5]], [[2, 3, 4, 5], [0, 1, 4, 5]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedVotes(WindowVotes):
    """The example's grouped votes instead of attention; window rows get garbage that must never compete."""

    def votes(self, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        return torch.tensor([[[*votes, 9e9, 9e9] for votes in VOTES[seen.layer]]])


def test_votes_to_packed_rows() -> None:
    evidence = WindowVotes(window_queries=2, kernel_size=3, pooling="avg")
    pooled = evidence.refine(torch.tensor([[VOTE]]))
    assert pooled[0, 0].tolist() == pytest.approx(POOLED, abs=1e-6)
    assert snapkv.pool(VOTE, 3, "avg") == pytest.approx(POOLED, abs=1e-6)
    scores = torch.cat([pooled, torch.zeros(1, 1, 2)], dim=2)
    window = torch.tensor([[[False] * 4 + [True] * 2]])
    keep = keep_best(scores, torch.ones_like(window), window, [4])
    assert kept_index(keep, [4]).index_BMK.tolist() == [[[1, 2, 4, 5]]]


def test_without_pooling_the_isolated_peaks_win() -> None:
    evidence = WindowVotes(window_queries=2, kernel_size=1, pooling="avg")
    assert evidence.refine(torch.tensor([[VOTE]]))[0, 0].topk(2).indices.tolist() == [2, 0]


def test_the_trace_on_the_engine() -> None:
    model = tiny_llama()
    cache = kv.PolicyCache(
        model,
        Composition(
            policy="scripted",
            schedule="end_of_prefill",
            evidence=ScriptedVotes(window_queries=2, kernel_size=3, pooling="avg"),
            budget=parse_budget(4),
            window_rows=2,
            options={"budget": 4},
        ),
    )
    before = cache.state
    feed(model, cache, tokens(6))
    assert kept(cache) == PACKED
    compressed = cache.state
    assert compressed.state_generation == before.state_generation + 1
    assert compressed.parent_state_generation == before.state_generation
    assert compressed.source_committed_frontier == 6
    assert cache.receipt.rows_per_owner == ((4, 4), (4, 4))
    assert [3 in owner for layer in kept(cache) for owner in layer] == [False, False, True, False]

    # Decode appends one row to every owner; the selection, and with it the state generation, stays.
    for position in (6, 7, 8):
        feed(model, cache, tokens(1, seed=position))
        grown = [[[*owner, *range(6, position + 1)] for owner in layer] for layer in PACKED]
        assert kept(cache) == grown
        assert cache.state.state_generation == compressed.state_generation
        assert cache.state.decision_epoch == compressed.decision_epoch
        assert cache.state.cache_generation == compressed.cache_generation + position - 5
        assert cache.state.source_committed_frontier == position + 1
        assert cache.ledger().tail_rows == (position - 5) * 4
    cache.check_integrity()


def test_the_packed_rows_hold_the_keys_of_their_positions() -> None:
    """What a full cache holds at position p is what the packed row of p holds, for K and V alike."""
    model = tiny_llama()
    whole, cache = kv.FullCache(model), kv.SnapKVCache(model, budget=6, window=2, kernel_size=3)
    for made in (whole, cache):
        feed(model, made, tokens(20))
    for layer in range(2):
        for source, packed in zip(whole.stored_view(layer), cache.stored_view(layer), strict=True):
            assert source is not None
            assert packed is not None
            for head, positions in enumerate(cache.positions(layer)):
                torch.testing.assert_close(packed[0, head], source[0, head, positions], rtol=0, atol=1e-6)


# -- 0x07J ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored_heads", "positions", "payload_bytes"),
    [(2, range(6), 288), (2, [1, 2, 4, 5], 192), (4, range(6), 576), (4, [1, 2, 4, 5], 384)],
)
def test_bytes_of_both_owners(stored_heads: int, positions: list[int], payload_bytes: int) -> None:
    """B = 1, L = 2, H_q = 4, H_kv = 2, d = 3, two bytes an element. Storage alone: rope needs an even d."""
    rows = torch.zeros(1, 2, 6, 3, dtype=torch.bfloat16)
    index = torch.tensor(list(positions)).view(1, 1, -1)
    layers = [pack_rows(rows, rows, index, stored_heads=stored_heads, capacity=index.shape[2]) for _ in range(2)]
    measured = sum(t.untyped_storage().nbytes() for layer in layers for t in layer.tensors())
    assert measured == payload_bytes
    assert layers[0].row_bytes * stored_heads * 2 == {2: 48, 4: 96}[stored_heads]  # one generated token


@pytest.mark.parametrize(
    ("owner", "budget", "rows", "payload_bytes"),
    [("kv_head", 6, 6, 288), ("kv_head", 4, 4, 192), ("query_head", 6, 6, 576), ("query_head", 4, 4, 384)],
)
def test_the_ledger_charges_the_owner(owner: str, budget: int, rows: int, payload_bytes: int) -> None:
    """The same example at d = 6 on the engine: twice the bytes, all else equal."""
    model = tiny_llama(head_dim=6, dtype=torch.bfloat16)
    cache = kv.SnapKVCache(model, budget=budget, window=2, kernel_size=3, owner=owner)
    feed(model, cache, tokens(6))
    heads = 4 if owner == "query_head" else 2
    assert cache.stored_rows(0).tolist() == [[rows] * heads]
    assert [len(layer) for layer in kept(cache)] == [heads] * 2
    assert cache.ledger().payload_bytes == 2 * payload_bytes
    assert cache.ledger().full_payload_bytes == 2 * 288, "a full cache is charged per KV head"
    feed(model, cache, tokens(1, seed=2))
    assert cache.ledger().payload_bytes == 2 * (payload_bytes + 48 * heads // 2)
    cache.check_integrity()


# -- 0x07F ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["snapkv", "random"])
@pytest.mark.parametrize("prompt", [1, 2, 5, 11, 12])
@pytest.mark.parametrize("unit", ["head", "layer", "token"])
def test_a_prompt_within_its_budget_is_kept_whole(policy: str, prompt: int, unit: str) -> None:
    model = tiny_llama()
    cache = kv.make_cache(policy, model, budget=12, window=4, unit=unit)
    feed(model, cache, tokens(prompt))
    assert kept(cache) == everywhere(list(range(prompt)))
    assert cache.statistics.selections == cache.statistics.rows_dropped == 0
    feed(model, cache, tokens(1, seed=2))
    assert kept(cache) == everywhere(list(range(prompt + 1)))


@pytest.mark.parametrize("policy", ["snapkv", "random"])
@pytest.mark.parametrize("unit", ["head", "layer", "token"])
def test_one_row_over_the_budget_drops_one_row(policy: str, unit: str) -> None:
    model = tiny_llama()
    cache = kv.make_cache(policy, model, budget=12, window=4, unit=unit)
    feed(model, cache, tokens(13))
    assert [len(owner) for layer in kept(cache) for owner in layer] == [12] * 4
    assert all(owner[-4:] == [9, 10, 11, 12] for layer in kept(cache) for owner in layer)
    assert cache.statistics.rows_dropped == 4
