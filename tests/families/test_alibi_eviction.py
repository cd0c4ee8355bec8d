"""After eviction, logits are those of attention over the kept rows, biased by the distances that were declared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    FULL,
    drops_tokens,
    forward,
    generate,
    has_budget,
    kept_positions,
    options_for,
    policies,
    policy_units,
    prompt,
    small_options,
)

import hf_kvpolicy as kv

from ._alibi_models import KINDS, MODELS, attached, backends_of
from ._plain_decoder import PlainDecoder

ATOL = 2e-5
# Policies that let rows go; one that merges layers keeps every token.
DROPPING = [name for name in policies(lossy=True) if has_budget(name)]
# (tokens of each forward): a prompt, an answer, a second turn, an answer.
FORWARDS = (17, 1, 1, 1, 1, 4, 1, 1)


def follows_the_plain_decoder(model: Any, policy: str, options: dict[str, Any]) -> None:
    cache = kv.make_cache(policy, model, **options_for(model, policy, options))
    plain, ids = PlainDecoder(model), prompt(sum(FORWARDS))[0]
    local = cache.composition.positions == "cache_local"
    start, lost = 0, False
    for length in FORWARDS:
        held = kept_positions(cache) if start else [[]] * cache.num_layers
        part = ids[start : start + length]
        with torch.no_grad():
            given = forward(model, part[None], cache)[0]
        prunes = drops_tokens(cache) and length > 1
        wanted = plain.feed(part.tolist(), held, local=local, passed=kept_positions(cache) if prunes else None)
        torch.testing.assert_close(given, wanted[-given.shape[0] :], atol=ATOL, rtol=1e-4)
        start += length
        lost = lost or int(cache.stored_rows(0).min()) < start
    assert lost, "a test of eviction needs one"
    cache.check_integrity()


@pytest.mark.proves("logits", family="mpt_6_heads")
@pytest.mark.parametrize(
    ("policy", "options"),
    [unit for unit in policy_units() if unit[0] in DROPPING],
    ids=lambda v: str(v) if isinstance(v, str) else "",
)
def test_every_policy_on_mpt(policy: str, options: dict[str, Any]) -> None:
    follows_the_plain_decoder(attached("mpt_6_heads"), policy, options)


@pytest.mark.proves("logits")
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(policy, marks=pytest.mark.proves("cache_local") if policy == "streaming_llm" else ())
        for policy in (DROPPING if FULL else ("snapkv", "streaming_llm", "adakv", "h2o"))
    ],
)
@pytest.mark.parametrize("name", MODELS)
def test_every_family(name: str, policy: str) -> None:
    follows_the_plain_decoder(attached(name), policy, small_options(policy))


@pytest.mark.proves("logits")
@pytest.mark.parametrize("policy", ["pyramidinfer", "fastgen", "keyformer"])
@pytest.mark.parametrize("name", KINDS[1:])
def test_policies_with_steps_of_their_own(name: str, policy: str) -> None:
    follows_the_plain_decoder(attached(name), policy, small_options(policy))


@pytest.mark.parametrize("policy", ["snapkv", "adakv"])
@pytest.mark.parametrize("name", [name for name in MODELS if "eager" in backends_of(name)])
def test_eager(name: str, policy: str) -> None:
    follows_the_plain_decoder(attached(name, "eager"), policy, small_options(policy))


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "adakv", "pyramidinfer"])
def test_queries_in_blocks(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("step", "ragged.layers"):
        monkeypatch.setattr(f"hf_kvpolicy.engine.{module}.MASK_BLOCK_ELEMENTS", 6 * 20 * 3)
    follows_the_plain_decoder(attached("mpt_6_heads", "eager"), policy, small_options(policy))


@pytest.mark.parametrize("name", MODELS)
def test_local_and_original_positions_differ(name: str) -> None:
    """The comparisons above would mean little otherwise."""
    model, seen = attached(name), []
    for positions in ("cache_local", "original"):
        cache = kv.StreamingLLMCache(model, budget=7, sinks=2, positions=positions)
        with torch.no_grad():
            forward(model, prompt(30), cache)
            seen.append(forward(model, prompt(1), cache))
    assert (seen[0] - seen[1]).abs().max() > 1e-3


@pytest.mark.parametrize("policy", DROPPING)
def test_generate_leaves_the_rows_that_were_asked_for(policy: str) -> None:
    model, ids = attached("mpt_6_heads"), prompt(40)
    options = options_for(model, policy, small_options(policy))
    caches = [kv.make_cache(policy, model, **options) for _ in range(2)]
    for cache, new in zip(caches, (1, 8), strict=True):
        output = generate(model, ids, cache, new=new)
        assert output.shape[1] == cache.get_seq_length() + 1 == 40 + new
        cache.check_integrity()
    after_prompt, after_answer = (sum(int(c.stored_rows(layer).sum()) for layer in range(2)) for c in caches)
    asked = options["budget"] * 2 * 6
    # Heads that need less take less; what is dropped at once may be more than is too much.
    assert after_prompt <= asked if policy in ("fastgen", "scissorhands") else after_prompt == asked
    grows = caches[1].composition.schedule in ("end_of_prefill", "in_prefill")
    assert after_answer <= asked + (7 * 2 * 6 if grows else 0)


@pytest.mark.parametrize("name", KINDS)
def test_merged_layers_hold_less_than_two(name: str) -> None:
    model, ids = attached(name), prompt(40)
    merged, full = (
        kv.make_cache(policy, model, **options_for(model, policy, small_options(policy)))
        for policy in ("minicache", "full")
    )
    for cache in (merged, full):
        generate(model, ids, cache, new=4)
        cache.check_integrity()
    assert merged.stored_rows(0).tolist() == full.stored_rows(0).tolist(), "every token stays"
    assert merged.ledger().payload_bytes < full.ledger().payload_bytes
