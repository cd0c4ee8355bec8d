"""Evidence that reads positions only: the seeded hash and recency."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_kvpolicy.evidence import LayerObservation, Recency, SeededRandom, hash_unit_reference


def seen(tokens_BMN: Tensor, layer: int = 0) -> LayerObservation:
    batch, _, rows = tokens_BMN.shape
    return LayerObservation(
        layer=layer,
        queries_BQWD=None,
        observed_BW=None,
        keys_BHND=torch.zeros(batch, 1, rows, 1),
        tokens_BMN=tokens_BMN,
        visibility=lambda: None,
        scaling=1.0,
    )


def scores(seed: int, layer: int, heads: int, tokens: Tensor) -> Tensor:
    return SeededRandom(seed=seed).votes(seen(tokens.view(1, 1, -1), layer), group="mean", score_heads=heads)[0]


@pytest.mark.parametrize("seed", [0, 1, 7, -1, 2**31 - 1, 2**40 + 3])
@pytest.mark.parametrize("layer", [0, 1, 79])
def test_the_hash_equals_its_reference(seed: int, layer: int) -> None:
    tokens = torch.tensor([0, 1, 2, 3, 299, 8191, 131072, 2**24 + 1, 2**30])
    got = scores(seed, layer, 3, tokens)
    assert got.dtype == torch.float32
    expected = [[hash_unit_reference(seed, layer, head, int(t)) for t in tokens] for head in range(3)]
    assert got.tolist() == expected


def test_the_hash_reads_no_batch_index_and_no_neighbours() -> None:
    tokens = torch.tensor([[[5, 9, 2, 0]], [[0, 5, 7, 9]], [[5, 9, 2, 0]]], dtype=torch.int32)
    got = SeededRandom(seed=3).votes(seen(tokens), group="mean", score_heads=2)
    assert torch.equal(got[0], got[2])
    assert torch.equal(got[0, :, 0], got[1, :, 1])  # token 5
    assert torch.equal(got[0, :, 1], got[1, :, 3])  # token 9
    assert torch.equal(got[0, :, 3], got[1, :, 0])  # token 0


def test_each_head_may_hold_tokens_of_its_own() -> None:
    tokens = torch.tensor([[[0, 4, 8], [1, 4, 9]]], dtype=torch.int32)
    got = SeededRandom(seed=3).votes(seen(tokens, layer=1), group="mean", score_heads=2)[0]
    assert got[0].tolist() == [hash_unit_reference(3, 1, 0, t) for t in (0, 4, 8)]
    assert got[1].tolist() == [hash_unit_reference(3, 1, 1, t) for t in (1, 4, 9)]


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_the_hash_looks_uniform_and_independent(seed: int) -> None:
    tokens = torch.arange(20_000)
    draws = torch.stack([scores(seed, layer, 3, tokens) for layer in range(3)]).view(9, -1).double()
    assert (draws >= 0).all()
    assert (draws < 1).all()
    # 9 x 20000 uniform draws: mean within 5 sigma, and 20 bins by chi-square (19 degrees of freedom, mean 19).
    assert abs(draws.mean().item() - 0.5) < 5 * (1 / 12 / draws.numel()) ** 0.5
    for row in draws:
        counts = torch.histc(row.float(), bins=20, min=0, max=1)
        assert ((counts - 1000) ** 2 / 1000).sum().item() < 60
    others = torch.stack([scores(seed + 1, 0, 1, tokens)[0], scores(seed, 0, 1, tokens + 1)[0]]).double()
    together = torch.cat([draws, others])
    correlation = torch.corrcoef(together) - torch.eye(together.shape[0], dtype=torch.float64)
    assert correlation.abs().max() < 0.05


def test_recency_prefers_newer_rows_and_never_ties() -> None:
    tokens = torch.tensor([0, 1, 2**24, 2**24 + 1, 2**24 + 2], dtype=torch.int32).view(1, 1, -1)
    votes = Recency().votes(seen(tokens), group="mean", score_heads=4)
    assert (votes[..., 1:] > votes[..., :-1]).all()
    assert torch.equal(Recency().refine(votes), votes)
    assert not Recency().differs_by_layer
