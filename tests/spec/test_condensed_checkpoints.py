"""Layer-condensed checkpoints: what they admit, what is refused, and the patch on one model's decoder."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers import (
    CACHE,
    TRAINED,
    dynamic_cache,
    forward,
    prompt,
    small_options,
    tiny,
)
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, Qwen3Config, Qwen3ForCausalLM

import hf_kvpolicy as kv

from ._condensed import TEACHING, condensed, fed

# -- the patch on one model -------------------------------------------------------------------------------------------


@torch.no_grad()
def test_detach_removes_it_and_other_caches_never_meet_it() -> None:
    model, plain = condensed(TEACHING), condensed(TEACHING)
    before = dict(model.model.__dict__)
    cache = kv.LayerCondensedCache(model)
    fed(model, cache, prompt(9), (9,))
    assert "forward" in model.model.__dict__
    for attached in (True, False):
        for given in ({}, {"use_cache": False}):
            caches = [{} if given else {CACHE: dynamic_cache(model)} for _ in range(2)]
            found, expected = (
                each(prompt(20), **used, **given).logits for each, used in zip((model, plain), caches, strict=True)
            )
            assert torch.equal(found, expected)
        if attached:
            kv.detach(model)
    assert model.model.__dict__.keys() == before.keys()
    with pytest.raises(kv.ConfigError, match="was not made ready"):
        forward(model, prompt(1), cache)
    kv.attach(kv.attach(model))
    forward(model, prompt(1), cache)
    kv.detach(kv.detach(model))
    assert model.model.__dict__.keys() == before.keys()


@torch.no_grad()
def test_a_copy_of_an_attached_model_carries_its_own() -> None:
    model = condensed(TEACHING)
    expected = fed(model, kv.LayerCondensedCache(model), prompt(12), (12,))
    twin = copy.deepcopy(model)
    kv.detach(model)
    assert twin.model.forward.module is twin.model
    assert torch.equal(fed(twin, kv.LayerCondensedCache(twin), prompt(12), (12,)), expected)


def test_a_decoder_whose_forward_is_somebody_else_s_is_refused() -> None:
    model = condensed(TEACHING)
    model.model.forward = model.model.forward
    with pytest.raises(kv.UnsupportedModelError, match="was replaced on the instance"):
        kv.LayerCondensedCache(model)
    assert kv.attached_backend(model) is None


@torch.no_grad()
def test_a_model_attached_before_its_config_changed_is_refused() -> None:
    trained, model = condensed(TEACHING), kv.attach(tiny("llama", layers=6))
    model.config.kvpolicy = trained.config.kvpolicy
    cache = kv.LayerCondensedCache(trained.config)
    with pytest.raises(kv.ConfigError, match=r"attach\(model\) again"):
        forward(model, prompt(9), cache)
    kv.attach(model)
    forward(model, prompt(9), cache)
    assert cache.get_seq_length() == 9


# -- which checkpoints ------------------------------------------------------------------------------------------------


def test_an_ordinary_checkpoint_is_refused() -> None:
    model = tiny("llama")
    for given in (model, model.config):
        with pytest.raises(kv.CheckpointAdmissionError, match="needs a checkpoint that was trained for it"):
            kv.LayerCondensedCache(given)
    assert kv.attached_backend(model) is None


@pytest.mark.parametrize("policy", [name for name in kv.available_policies() if name not in TRAINED])
def test_every_other_policy_refuses_the_checkpoint(policy: str) -> None:
    model = condensed((1, 1))
    for given in (model, model.config):
        with pytest.raises(kv.CheckpointAdmissionError, match="trained for layer_condensed"):
            kv.make_cache(policy, given, **small_options(policy))
    cache = kv.make_cache(policy, tiny("llama").config, **small_options(policy))
    kv.attach(model)
    with pytest.raises(kv.CheckpointAdmissionError, match="trained for layer_condensed"):
        forward(model, prompt(3), cache)


def test_a_cache_of_another_graph_is_refused() -> None:
    model = kv.attach(condensed(TEACHING))
    cache = kv.LayerCondensedCache(condensed((5,) * 6).config)
    with pytest.raises(kv.CheckpointAdmissionError, match=r"'map': \[5, 5, 5, 5, 5, 5\]"):
        forward(model, prompt(3), cache)
    ordinary = kv.attach(tiny("llama", layers=6))
    with pytest.raises(kv.CheckpointAdmissionError, match="ordinary"):
        forward(ordinary, prompt(3), cache)


ENTRY = {"kind": "layer_condensed", "map": list(TEACHING), "forward_passes": 7, "backward_passes": 2}


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"map": None}, kv.CheckpointAdmissionError, "of 6 layers"),
        ({"map": [0, 5]}, kv.CheckpointAdmissionError, "of 6 layers"),
        ({"map": "055555"}, kv.CheckpointAdmissionError, "of 6 layers"),
        ({"map": [0, 5, 5, 5, 5, "5"]}, kv.CheckpointAdmissionError, "of 6 layers"),
        ({"map": [0, 5, 5, 5, 5, True]}, kv.CheckpointAdmissionError, "of 6 layers"),
        ({"map": [0, 5, 5, 5, 5, 4]}, kv.ManifestError, "reads the store they go into"),
        ({"map": [0, 6, 6, 6, 6, 6]}, kv.ManifestError, r"0\.\.5"),
        ({"map": [0, -1, 5, 5, 5, 5]}, kv.ManifestError, "a layer of the producer and consumer maps"),
        ({"forward_passes": -1}, kv.CheckpointAdmissionError, "forward_passes=-1"),
        ({"forward_passes": 1.5}, kv.CheckpointAdmissionError, "forward_passes=1.5"),
        ({"backward_passes": 0}, kv.CheckpointAdmissionError, "backward_passes=0"),
        ({"backward_passes": None}, kv.CheckpointAdmissionError, "backward_passes=None"),
        ({"warm_up": 2}, kv.CheckpointAdmissionError, "and no others"),
        ({"kind": "layer_condensd"}, kv.CheckpointAdmissionError, "one of dmc, layer_condensed;"),
        ({"kind": None}, kv.CheckpointAdmissionError, "one of dmc, layer_condensed;"),
    ],
    ids=str,
)
def test_a_malformed_entry_is_refused(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    config = LlamaConfig(num_hidden_layers=6, kvpolicy={**ENTRY, **changes})
    with pytest.raises(error, match=message):
        kv.LayerCondensedCache(config)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"passes": 0}, "at least 1"), ({"encoding": "parallel"}, "allowed are"), ({"budget": 8}, "no option 'budget'")],
    ids=str,
)
def test_options_outside_their_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(kv.ConfigError, match=message):
        kv.LayerCondensedCache(condensed(TEACHING), **options)


def test_a_family_that_is_not_known_to_repeat_its_layers_is_refused() -> None:
    small: dict[str, Any] = {
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 31
    }  # fmt: skip
    entry = {**ENTRY, "map": [1, 1]}
    models = [
        GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=31, kvpolicy=entry)),
        Qwen3ForCausalLM(Qwen3Config(**small, hidden_size=16, intermediate_size=16, kvpolicy=entry)),
    ]
    for model in models:
        with pytest.raises(kv.UnsupportedModelError, match="Use a Llama or Mistral checkpoint"):
            kv.LayerCondensedCache(model)
        assert kv.attached_backend(model) is None
        assert "forward" not in model.base_model.__dict__


@torch.no_grad()
def test_a_saved_checkpoint_keeps_its_entry(tmp_path: Any) -> None:
    model = condensed(TEACHING)
    expected = fed(model, kv.LayerCondensedCache(model), prompt(12), (12,))
    kv.detach(model).save_pretrained(tmp_path / "model")
    loaded = type(model).from_pretrained(tmp_path / "model")
    cache = kv.LayerCondensedCache(loaded)
    assert torch.equal(fed(loaded, cache, prompt(12), (12,)), expected)
    cache.save_pretrained(tmp_path / "cache")
    again = kv.load_cache(tmp_path / "cache", loaded)
    assert again.ledger() == cache.ledger()
    assert torch.equal(fed(loaded, again, prompt(4, 1), (3, 1)), fed(loaded, cache, prompt(4, 1), (3, 1)))
    loaded.config.kvpolicy = {**loaded.config.kvpolicy, "map": [5] * 6}
    with pytest.raises(kv.CheckpointAdmissionError, match="other weights"):
        kv.load_cache(tmp_path / "cache", loaded)
