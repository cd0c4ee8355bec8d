"""One context, many questions; and which caches may be reused as exact prefixes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import case_id, content, forward, make_cache, policy_units, prompt, stored_otherwise, tiny

import hf_kvpolicy as kv

CASES = [*policy_units(), *stored_otherwise()]


def assert_same(found: dict[str, Any], before: dict[str, Any]) -> None:
    assert found.keys() == before.keys()
    for name, value in before.items():
        equal = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert equal, name


@pytest.mark.proves("branched", family="llama")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_questions_start_from_the_same_state(case: tuple[str, dict[str, Any]]) -> None:
    """Each question equals the question asked of a fork, and the context is left as it was, bit for bit."""
    name, options = case
    model = tiny("llama")
    cache = make_cache(name, model, **options)
    with torch.inference_mode():
        forward(model, prompt(30), cache)
        forward(model, prompt(1, seed=1), cache)
        before, generation = content(cache), cache.state.cache_generation
        for seed in (2, 3, 4):
            question, twin = prompt(9, seed=seed), cache.fork()
            expected = [forward(model, question, twin), forward(model, prompt(1, seed=9), twin)]
            with cache.branch():
                torch.testing.assert_close(forward(model, question, cache), expected[0], atol=0, rtol=0)
                torch.testing.assert_close(forward(model, prompt(1, seed=9), cache), expected[1], atol=0, rtol=0)
            cache.check_integrity()
            assert_same(content(cache), before)
    assert cache.state.cache_generation > generation, "numbers are never reused"


def test_a_branch_that_fails_leaves_the_context() -> None:
    model = tiny("llama")
    cache = kv.H2OCache(model, budget=8)
    with torch.inference_mode():
        forward(model, prompt(20), cache)
        before = content(cache)
        with pytest.raises(kv.ConfigError, match="batch rows"), cache.branch():
            forward(model, prompt(5, seed=2, rows=2), cache)
    assert_same(content(cache), before)
    cache.check_integrity()


def test_recording_ends_with_the_branch() -> None:
    model = tiny("llama")
    cache = kv.SnapKVCache(model, budget=8, window=3)
    with torch.inference_mode():
        forward(model, prompt(20), cache)
        with cache.branch():
            cache.activate_past_recording()
            forward(model, prompt(5, seed=2), cache)
    assert not cache.is_recording_past()
    assert cache.get_seq_length() == 20


def test_only_an_exact_cache_has_a_prefix_identity() -> None:
    model, ids = tiny("llama"), prompt(20)
    full = kv.FullCache(model)
    with torch.inference_mode():
        forward(model, ids, full)
    tokens = ids[0].tolist()
    assert full.prefix_digest(tokens) == full.prefix_digest(tokens)
    assert full.prefix_digest(tokens) != full.prefix_digest([*tokens[:-1], tokens[-1] + 1])
    with pytest.raises(kv.ConfigError, match="19 token ids"):
        full.prefix_digest(tokens[:-1])


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_lossy_cache_is_refused_as_a_prefix(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    model = tiny("llama")
    cache = make_cache(name, model, **options)
    with torch.inference_mode():
        forward(model, prompt(20), cache)
    with pytest.raises(kv.ManifestError, match="decided by the queries it saw"):
        cache.prefix_digest(prompt(20)[0].tolist())
