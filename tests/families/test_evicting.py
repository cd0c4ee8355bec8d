"""An evicting policy's logits equal dense attention over the rows it keeps; its evidence equals eager attention."""

from __future__ import annotations

from typing import Any

import helpers
import pytest
import torch
from helpers import (
    CACHE,
    FULL,
    PRUNING,
    dynamic_cache,
    forward,
    has_budget,
    left_padded,
    neutral_cache,
    options_for,
    policies,
    prompt,
    small_options,
)
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.evidence import LayerObservation, WindowVotes

from . import _table
from ._reference import MaskedReference, SlotReference
from ._table import FAMILIES, NOT_PRUNED

# Without quirks, so that they have no entry in the table.
PLAIN = ("mistral", "mistral_window")
EVERY = (*FAMILIES, *PLAIN)
LENGTHS = (21, 13)
_POSITIONS = torch.arange(40)[None]
STEPS = 6
POLICIES: dict[str, dict[str, Any]] = {
    "snapkv": {"budget": 8, "window": 3, "kernel_size": 3},
    "streaming_llm": {"budget": 7, "sinks": 2, "positions": "original"},
    "adakv": {"budget": 8, "window": 3, "kernel_size": 3, "alpha": 0.5},
}
if FULL:
    # What drops tokens between layers has a test of its own below.
    dropping = [name for name in policies(lossy=True) if has_budget(name) and name not in PRUNING]
    POLICIES = {name: small_options(name) for name in dropping} | POLICIES


def tiny(family: str, backend: str | None = None) -> Any:
    """Return a fresh tiny model of a family of either table."""
    if family in PLAIN:
        return helpers.tiny(family, backend or "sdpa", layers=4)
    return _table.tiny(family, backend)


def _kept_columns(cache: Any, pads: list[int]) -> dict[int, list[list[list[int]]]]:
    """Return the columns that each layer, batch row and KV head of a cache holds."""
    return {
        layer: [
            [(owner + pads[row]).tolist() for owner in cache.positions(layer, batch=row)] for row in range(len(pads))
        ]
        for layer in cache.policy_layers
    }


@pytest.mark.proves("logits")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", EVERY)
def test_logits_equal_dense_attention_over_the_kept_rows(family: str, name: str) -> None:
    model, reference = tiny(family), MaskedReference(tiny(family, "eager"))
    cache = kv.make_cache(name, model, **options_for(model, name, POLICIES[name]))
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    pads = [ids.shape[1] - n for n in LENGTHS]
    more = prompt(STEPS, seed=40, rows=len(LENGTHS))
    with torch.no_grad():
        for step in range(STEPS):
            piece = ids if not step else more[:, step - 1 : step]
            mask = mask if not step else torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -piece.shape[1] :]
            given = {"attention_mask": mask, "position_ids": positions}
            reference.seen = _kept_columns(cache, pads) if step else None
            expected, found = reference.feed(piece, **given), forward(model, piece, cache, **given)
            real = mask[:, -piece.shape[1] :].bool()
            torch.testing.assert_close(
                found[real], expected[real], atol=2e-5, rtol=0, msg=lambda m, at=step: f"{at}: {m}"
            )
    assert all(int(n) < sum(LENGTHS) for layer in cache.policy_layers for n in cache.stored_rows(layer).flatten())
    assert cache.statistics.rows_dropped > 0
    cache.check_integrity()


@pytest.fixture
def votes(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The votes that observation windows gave, by layer, before heads are reduced."""
    found: list[Tensor] = []
    own = WindowVotes.votes

    def recorded(self: WindowVotes, seen: LayerObservation, *, group: str, score_heads: int) -> Tensor:
        given = own(self, seen, group=group, score_heads=score_heads)
        found.append(given)
        return given

    monkeypatch.setattr(WindowVotes, "votes", recorded)
    return found


@pytest.mark.proves("evidence", policy="snapkv")
@pytest.mark.parametrize("family", EVERY)
def test_evidence_equals_eager_attention(family: str, votes: list[Tensor]) -> None:
    window, heads = 3, 4
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    given = {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    with torch.no_grad():
        weights = tiny(family, "eager")(ids, **given, output_attentions=True, use_cache=False).attentions
        model = tiny(family)
        cache = kv.SnapKVCache(model, **POLICIES["snapkv"], owner="query_head")
        forward(model, ids, cache, **given)
    weights = dict(zip(cache.geometry.attending_layers, weights, strict=True))
    assert len(votes) == len(cache.policy_layers)
    for layer, found in zip(cache.policy_layers, votes, strict=True):
        wanted = weights[layer][:, :, -window:].sum(dim=2)
        assert found.shape == (len(LENGTHS), heads, ids.shape[1])
        for row, length in enumerate(LENGTHS):
            torch.testing.assert_close(found[row, :, -length:], wanted[row, :, -length:], atol=1e-5, rtol=0)


@pytest.mark.proves("evidence", policy="h2o")
@pytest.mark.parametrize("family", EVERY)
def test_carried_scores_equal_sums_of_eager_attention(family: str) -> None:
    """A prompt's queries are taken in blocks, a decode token's with the softmax of its output: both enter the sums."""
    ids = prompt(20)
    with torch.no_grad():
        weights = tiny(family, "eager")(ids, output_attentions=True, use_cache=False).attentions
        model = tiny(family)
        cache = neutral_cache("h2o", model, 64, group="sum")
        # Bamba numbers tokens from 0 in every forward that is not told positions.
        for start, stop in ((0, 17), (17, 18), (18, 19), (19, 20)):
            forward(model, ids[:, start:stop], cache, position_ids=_POSITIONS[:, start:stop])
    weights = dict(zip(cache.geometry.attending_layers, weights, strict=True))
    for number, layer in enumerate(cache.policy_layers):
        found = cache._runtime.snapshot.scores_LBSWX[number, 0, :, :20, 0]
        wanted = weights[layer][0].sum(dim=1).view(found.shape[0], -1, 20).sum(dim=1)
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


@pytest.mark.proves("logits", policy="pyramidinfer")
@pytest.mark.parametrize("family", [name for name in EVERY if name not in NOT_PRUNED])
def test_tokens_dropped_between_layers_equal_dense_attention_without_them(family: str) -> None:
    model, reference = tiny(family), MaskedReference(tiny(family, "eager"))
    cache = kv.PyramidInferCache(model, decay=0.6, sinks=2, min_context=2)
    ids = prompt(24)
    with torch.no_grad():
        found = forward(model, ids, cache)[:, -1]
    # What a layer keeps is what the next one computes.
    kept = _kept_columns(cache, [0])
    reference.seen, reference.hides_new = {layer + 1: kept[layer] for layer in kept}, True
    torch.testing.assert_close(found, reference.feed(ids)[:, -1], atol=2e-5, rtol=0)
    assert int(cache.stored_rows(3).max()) < int(cache.stored_rows(1).max()) < 24


@pytest.mark.proves("cache_local", policy="streaming_llm")
@pytest.mark.parametrize("family", [name for name in EVERY if name in PLAIN or FAMILIES[name].moves_keys])
def test_cache_local_positions_equal_keys_rotated_by_slot(family: str) -> None:
    model, budget, sinks = tiny(family), 9, 3
    cache = kv.StreamingLLMCache(model, budget=budget, sinks=sinks)
    reference = SlotReference(tiny(family, "eager"), cache.policy_layers, budget, sinks)
    ids = prompt(40)
    with torch.no_grad():
        for start, stop in [(0, 15), *((i, i + 1) for i in range(15, 34)), (34, 40)]:
            piece = ids[:, start:stop]
            expected = reference.feed(piece)
            found = forward(model, piece, cache, position_ids=_POSITIONS[:, start:stop])
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=lambda m, at=start: f"{at}: {m}")
    assert cache.positions(cache.policy_layers[0])[0].tolist() == reference.kept
    cache.check_integrity()


@pytest.mark.proves("cache_local", policy="streaming_llm", refused=True)
@pytest.mark.parametrize("family", [name for name, family in FAMILIES.items() if not family.moves_keys])
def test_learned_positions_are_not_moved(family: str) -> None:
    model = tiny(family)
    with pytest.raises(kv.UnsupportedModelError, match=r"learned positions.*Use positions='original'"):
        kv.StreamingLLMCache(model, budget=9)
    stock = dynamic_cache(model)
    with torch.no_grad():
        model(prompt(5), **{CACHE: stock}, use_cache=True)
    assert stock.get_seq_length() == 5
