"""Evidence is the attention that the model itself pays: eager `output_attentions`, and the plain decoder's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    TRAINED,
    assert_same_content,
    forward,
    kept_positions,
    left_padded,
    options_for,
    policies,
    prompt,
    small_options,
)
from reference.snapkv import pool
from torch import Tensor

import hf_kvpolicy as kv

from ._alibi_models import KINDS, MODELS, attached, backends_of, model_of
from ._plain_decoder import PlainDecoder

LENGTHS = (14, 1, 1, 1)


def own_attention(name: str, ids: Tensor) -> list[Tensor]:
    """Return each layer's attention [Q, T, T], as the model itself reports it where it reports the right one."""
    if not name.startswith("falcon_alibi"):  # whose eager attention adds the bias twice
        with torch.no_grad():
            output = model_of(name, "eager")(ids, output_attentions=True, use_cache=False)
        return [part[0] for part in output.attentions]
    plain, found = PlainDecoder(model_of(name)), []
    plain.feed(ids[0].tolist(), [[]] * len(plain.layers))
    for layer in plain.attention:
        heads = [[[of_head.get(row, 0.0) for row in layer] for of_head in query] for query in layer.values()]
        found.append(torch.tensor(heads).transpose(0, 1))
    return found


@pytest.mark.proves("evidence", policy="h2o")
@pytest.mark.parametrize(("name", "backend"), [(name, backend) for name in MODELS for backend in backends_of(name)])
def test_h2o_sums_the_models_attention(name: str, backend: str) -> None:
    model, ids = attached(name, backend), prompt(sum(LENGTHS))
    cache = kv.H2OCache(model, budget=12, group="mean")
    with torch.no_grad():
        forward(model, ids[:, :14], cache)
    scores = cache._runtime.snapshot.scores_LBSWX[..., 0]
    for layer, attention in enumerate(own_attention(name, ids[:, :14])):
        stored = cache.geometry.num_kv_heads
        received = attention.view(stored, -1, 14, 14).mean(1).sum(1)
        for head, kept in enumerate(cache.positions(layer)):
            assert len(kept) == 12
            torch.testing.assert_close(scores[layer, 0, head], received[head, kept], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_h2o_adds_decode_tokens(name: str) -> None:
    model, ids = attached(name), prompt(sum(LENGTHS))
    cache, start = kv.H2OCache(model, budget=40, group="mean"), 0
    for length in LENGTHS:
        with torch.no_grad():
            forward(model, ids[:, start : start + length], cache)
        start += length
    for layer, attention in enumerate(own_attention(name, ids)):
        received = attention.view(cache.geometry.num_kv_heads, -1, start, start).mean(1).sum(1)
        scores = cache._runtime.snapshot.scores_LBSWX[layer, 0, :, :start, 0]
        torch.testing.assert_close(scores, received, atol=1e-5, rtol=1e-4)


@pytest.mark.proves("evidence", policy="snapkv")
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mode", ["whole", "held", "ragged", "waiting"])
def test_snapkv_votes_with_the_models_attention(name: str, mode: str) -> None:
    budget, window = 10, 3
    model, ids = attached(name), prompt(23)
    options = {"budget": budget, "window": window, "kernel_size": 3}
    if mode == "ragged":
        cache: Any = kv.HeadKVCache(model, **options, profile="uniform")
    else:
        cache = kv.SnapKVCache(model, **options, chunked_prefill="hold" if mode == "held" else None)
    if mode == "waiting":
        cache.activate_past_recording()
    with torch.no_grad():
        for part in ids.split(9 if mode == "held" else 23, dim=1):
            forward(model, part, cache)
        if mode == "held":
            cache.finish_prefill()
        if mode == "waiting":
            cache.crop(0)
    for layer, attention in enumerate(own_attention(name, ids)):
        votes = attention[:, -window:].sum(1).view(cache.geometry.num_kv_heads, -1, 23).mean(1)[:, :-window]
        for head, kept in enumerate(cache.positions(layer)):
            scores = torch.tensor(pool(votes[head].tolist(), 3, "max"))
            best = scores.topk(budget - window).values.min()
            assert (scores[kept[:-window]] >= best - 1e-6).all(), (layer, head)
            assert kept[-window:].tolist() == [20, 21, 22]


@pytest.mark.proves("padded")
@pytest.mark.parametrize("policy", [name for name in policies(lossy=True) if name not in TRAINED])
@pytest.mark.parametrize("name", KINDS if FULL else KINDS[:1])
def test_padded_equals_solo(name: str, policy: str) -> None:
    model = attached(name)
    options = options_for(model, policy, small_options(policy))
    prompts = [prompt(24), prompt(15, seed=1)]
    ids, mask = left_padded(prompts)
    batch = kv.make_cache(policy, model, **options)
    padded = _run(model, ids, mask, batch)
    for row, alone in enumerate(prompts):
        cache = kv.make_cache(policy, model, **options)
        solo = _run(model, alone, torch.ones_like(alone), cache)
        torch.testing.assert_close(padded[row], solo[0], atol=2e-5, rtol=1e-4)
        assert kept_positions(batch, row) == kept_positions(cache)


def _run(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    """Return the logits after a prompt and after each of five given tokens, [B, 6, V]."""
    seen = []
    with torch.no_grad():
        seen.append(forward(model, ids, cache, attention_mask=mask, logits_to_keep=1)[:, -1])
        for token in prompt(5, seed=9)[0]:
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            seen.append(forward(model, token.expand(len(ids), 1), cache, attention_mask=mask)[:, -1])
    return torch.stack(seen, dim=1)


@pytest.mark.proves("recorded")
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "keyformer", "streaming_llm", "adakv", "fastgen"])
@pytest.mark.parametrize("name", KINDS)
def test_rejected_tokens_leave_nothing(name: str, policy: str) -> None:
    """A waiting prompt and waiting drafts, cropped, equal tokens that were never fed."""
    model, ids = attached(name), prompt(30)
    caches = [kv.make_cache(policy, model, **small_options(policy)) for _ in range(2)]
    seen = []
    for cache, rejects in zip(caches, (True, False), strict=True):
        cache.activate_past_recording()
        with torch.no_grad():
            for start, accepted, rejected in ((0, 18, 2), (18, 1, 3), (19, 3, 0), (22, 1, 2)):
                extra = rejected if rejects else 0
                forward(model, ids[:, start : start + accepted + extra], cache)
                cache.crop(-extra)
            cache.set_recording(False)
            seen.append(forward(model, ids[:, 23:24], cache))
    torch.testing.assert_close(*seen, atol=2e-5, rtol=1e-4)
    assert_same_content(*caches, atol=2e-5)
