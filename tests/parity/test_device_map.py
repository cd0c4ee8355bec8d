"""A model loaded with `device_map` gives a policy cache the tokens and rows that the whole model does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    assert_same_content,
    dynamic_cache,
    generate,
    left_padded,
    make_cache,
    neutral_cache,
    prompt,
    small_options,
    tiny,
)
from transformers import AutoModelForCausalLM

import hf_kvpolicy as kv

pytest.importorskip("accelerate", reason="needs accelerate, of the extra 'eval'")

POLICIES = ("snapkv", "streaming_llm", "adakv")
# Every second layer, and one end of the model.
MAPS = {
    "cpu_and_disk": ("cpu", "disk"),
    "disk": ("disk", "disk"),
    "gpu_and_cpu": (0, "cpu"),
    "gpu_and_disk": (0, "disk"),
    "two_gpus": (0, 1),
}
NEEDED_GPUS = {"gpu_and_cpu": 1, "gpu_and_disk": 1, "two_gpus": 2}
NAMES = [pytest.param(name, marks=pytest.mark.gpu if name in NEEDED_GPUS else ()) for name in MAPS]


def mapped(directory: Path, name: str) -> tuple[Any, Any]:
    """Return a tiny model as `from_pretrained` loads it with one of the maps, and the same model whole."""
    if torch.cuda.device_count() < NEEDED_GPUS.get(name, 0):
        pytest.skip("needs more CUDA devices than there are")
    whole = tiny("llama", layers=4)
    whole.save_pretrained(directory / "model")
    here, there = MAPS[name]
    places: dict[str, Any] = {f"model.layers.{layer}": (here, there)[layer % 2] for layer in range(4)}
    places |= {"model.embed_tokens": here, "model.norm": there, "model.rotary_emb": here, "lm_head": there}
    model = AutoModelForCausalLM.from_pretrained(
        directory / "model", device_map=places, offload_folder=str(directory / "offload")
    ).eval()
    assert model.hf_device_map == places
    assert "disk" not in MAPS[name] or any(weight.is_meta for weight in model.parameters())
    return model, whole


def turns(model: Any, cache: Any, device: torch.device) -> list[torch.Tensor]:
    """Answer a left-padded batch twice; return the ids after each answer."""
    ids, mask = (part.to(device) for part in left_padded([prompt(15, seed=1), prompt(24, seed=2)]))
    first = generate(model, ids, cache, 6, attention_mask=mask)
    again = torch.cat([first, prompt(9, seed=3, rows=2).to(device)], dim=1)
    mask = torch.cat([mask, torch.ones((2, again.shape[1] - mask.shape[1]), dtype=mask.dtype, device=device)], dim=1)
    return [first.cpu(), generate(model, again, cache, 6, attention_mask=mask).cpu()]


@pytest.mark.proves("device_map", family="llama")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
def test_tokens_and_rows_are_those_of_the_whole_model(policy: str, name: str, tmp_path: Path) -> None:
    model, whole = mapped(tmp_path, name)
    device = torch.device("cuda", 0) if name in NEEDED_GPUS else torch.device("cpu")
    cache, wanted = (make_cache(policy, one, **small_options(policy)) for one in (model, whole.to(device)))
    for found, expected in zip(turns(model, cache, device), turns(whole, wanted, device), strict=True):
        assert torch.equal(found, expected)
    assert cache.statistics.rows_dropped > 0
    assert_same_content(cache, wanted, atol=0 if device.type == "cpu" else 1e-5)
    cache.check_integrity()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", POLICIES)
def test_at_full_budget_equals_transformers_own_cache(policy: str, name: str, tmp_path: Path) -> None:
    model, _ = mapped(tmp_path, name)
    device = torch.device("cuda", 0) if name in NEEDED_GPUS else torch.device("cpu")
    stock = turns(model, dynamic_cache(model), device)
    for found, expected in zip(turns(model, neutral_cache(policy, model, 64), device), stock, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("name", ["cpu_and_disk", "disk"])
def test_saved_and_loaded_where_weights_are_on_disk(name: str, tmp_path: Path) -> None:
    """Which checkpoint a cache belongs to is read from the weights, and its rows go where layers compute."""
    model, whole = mapped(tmp_path, name)
    cache, wanted = (make_cache("snapkv", one, **small_options("snapkv")) for one in (model, whole))
    ids = prompt(20)
    generate(model, ids, cache, 2)
    generate(whole, ids, wanted, 2)
    assert cache.manifest == wanted.manifest
    cache.save_pretrained(tmp_path / "saved")
    ids = prompt(30, seed=5)
    expected = generate(whole, ids, wanted, 4)
    for one in (model, whole):
        loaded = kv.load_cache(tmp_path / "saved", one)
        assert torch.equal(generate(one, ids, loaded, 4), expected)
        assert_same_content(loaded, wanted)


def test_weights_that_are_nowhere_are_refused() -> None:
    model = tiny()
    cache = make_cache("snapkv", model, budget=8, window=3)
    model.to("meta")
    with pytest.raises(kv.ConfigError, match="no hook of accelerate fetches it"):
        assert cache.manifest.checkpoint_generation
