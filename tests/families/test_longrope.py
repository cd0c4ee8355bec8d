"""Phi-3's longrope: original positions work on either side of its limit; a policy is never dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import dynamic_cache, generate, prompt

import hf_kvpolicy as kv

from ._table import config_of, require

LIMIT = 16
_FACTORS = {"short_factor": [1.0, 1.0, 1.2, 1.5], "long_factor": [1.0, 2.0, 3.0, 4.0]}


def _phi3() -> Any:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": LIMIT, **_FACTORS}
    config = config_of("phi3-partial", rope_parameters=rope, original_max_position_embeddings=LIMIT)
    torch.manual_seed(4)
    model = require("phi3-partial").classes[1](config).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.mark.parametrize("length", [LIMIT - 8, LIMIT + 9], ids=["short", "long"])
def test_original_positions_equal_transformers_own_cache(length: int) -> None:
    model = _phi3()
    # transformers' own cache survives a long prompt only where its layers are made lazily, as generate makes them.
    expected = generate(model, prompt(length), None, 5)
    cache = kv.SnapKVCache(model, budget=40)
    assert torch.equal(generate(model, prompt(length), cache, 5), expected)
    assert cache.get_seq_length() == length + 4
    small = kv.SnapKVCache(model, budget=6, window=2)
    generate(model, prompt(length), small, 5)
    assert small.stored_rows(0).max() == 6 + 4


def test_growing_past_the_limit_is_refused_and_leaves_the_cache_usable() -> None:
    model = _phi3()
    cache = kv.SnapKVCache(model, budget=40)
    with pytest.raises(kv.ConfigError, match=r"original_max_position_embeddings.*without the policy"):
        generate(model, prompt(LIMIT - 3), cache, 9)
    assert cache.get_seq_length() == LIMIT
    cache.check_integrity()


def test_keys_whose_angles_depend_on_the_length_are_not_moved() -> None:
    with pytest.raises(kv.UnsupportedModelError, match="longrope"):
        kv.StreamingLLMCache(_phi3(), budget=9)


def test_detach_removes_the_watch() -> None:
    model = _phi3()
    kv.attach(kv.attach(model))
    assert "prepare_inputs_for_generation" in vars(model)
    kv.detach(model)
    assert "prepare_inputs_for_generation" not in vars(model)
    ids = generate(model, prompt(LIMIT - 3), dynamic_cache(model), 9)
    assert ids.shape[1] == LIMIT + 6
