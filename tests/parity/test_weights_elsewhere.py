"""Weights that accelerate's hooks fetch for each forward, from the CPU or from disk, change no token and no row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import assert_same_content, generate, make_cache, prompt, small_options, tiny

import hf_kvpolicy as kv

POLICIES = ("snapkv", "streaming_llm", "adakv")


@pytest.mark.proves("weights_away", family="llama")
@pytest.mark.parametrize("attached_first", [False, True], ids=["hooks_first", "attached_first"])
@pytest.mark.parametrize("place", ["cpu", "disk"])
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_and_rows_are_those_of_a_model_that_is_present(
    policy: str, place: str, attached_first: bool, tmp_path: Path
) -> None:
    accelerate = pytest.importorskip("accelerate", reason="needs accelerate, of the extra 'eval'")
    model, ids = tiny(), prompt(24, rows=2)
    if attached_first:
        kv.attach(model)
    given: dict[str, Any] = {"execution_device": torch.device("cpu")}
    if place == "disk":
        model = accelerate.disk_offload(model, tmp_path, **given)
    else:
        model = accelerate.cpu_offload(model, **given)
    assert {part.device.type for part in model.parameters()} == {"meta"}, "the weights are away between forwards"
    cache = make_cache(policy, model, **small_options(policy))
    present = tiny()
    wanted = make_cache(policy, present, **small_options(policy))
    assert torch.equal(generate(model, ids, cache, 8), generate(present, ids, wanted, 8))
    assert cache.statistics.rows_dropped > 0
    assert_same_content(cache, wanted, atol=0)
    assert cache.manifest == wanted.manifest, "which checkpoint it is, is read from where the weights are kept"
    cache.check_integrity()
    kv.detach(model)
    stock = tiny()
    assert torch.equal(model.generate(ids, max_new_tokens=4), stock.generate(ids, max_new_tokens=4))
