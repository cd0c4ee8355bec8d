"""Profiles on disk: a round trip, what damaged and foreign ones say, and caches that are made with them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import forward, generate, kept_positions, prompt, tiny
from transformers import AutoModelForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy import profiles
from hf_kvpolicy.contract import sha256_of
from hf_kvpolicy.fingerprint import weights_fingerprint
from hf_kvpolicy.profiles import Profile, load_profile, save_profile, shipped_profile

OPTIONS = {"budget": 8, "window": 3, "kernel_size": 3, "beta": 1}


def profile_for(model: Any, kind: str = "headkv") -> Profile:
    """Importances of four query heads in two layers; 0.1 + 0.2 is not 0.3 in binary."""
    return Profile(
        kind=kind,
        model="tiny",
        weights_sha256=weights_fingerprint(model.model),
        tokenizer_sha256="0" * 64,
        data={"haystack": "none"},
        measurement={"probe": "made up", "lengths": [30]},
        versions={"torch": "0"},
        num_kv_heads=2,
        query_heads_LQ=((0.1, 0.2, 1.5, 0.0), (0.0, 0.0, 0.7, 0.1)),
    )


@pytest.fixture
def model() -> Any:
    return tiny("llama")


@pytest.fixture
def path(model: Any, tmp_path: Path) -> Path:
    save_profile(profile_for(model), tmp_path / "new" / "profile.json")
    return tmp_path / "new" / "profile.json"


def alter(path: Path, change: Callable[[dict[str, Any]], None], *, sign: bool = False) -> None:
    envelope = json.loads(path.read_text())
    change(envelope)
    if sign:
        envelope["profile_sha256"] = sha256_of(envelope["profile"])
    path.write_text(json.dumps(envelope))


def test_a_round_trip(model: Any, path: Path) -> None:
    assert load_profile(path) == profile_for(model)
    record = json.loads(path.read_text())["profile"]
    assert record["kv_heads_LH"] == [[0.3, 1.5], [0.0, 0.8]]
    assert record["layers_L"] == [1.8, 0.8]
    assert record["geometry"] == {"num_layers": 2, "num_query_heads": 4, "num_kv_heads": 2}


def test_a_layer_profile_takes_means(model: Any) -> None:
    found = profile_for(model, "zigzagkv")
    assert found.kv_heads_LH == ((0.15, 0.75), (0.0, 0.4))
    assert found.layers_L == (0.45, 0.2)


@pytest.mark.parametrize(
    ("change", "sign"),
    [
        (lambda e: e["profile"]["query_heads_LQ"][0].__setitem__(1, 9.0), False),
        (lambda e: e["profile"]["query_heads_LQ"][0].__setitem__(1, 9.0), True),
        (lambda e: e["profile"]["kv_heads_LH"][1].__setitem__(0, 1.0), True),
        (lambda e: e["profile"]["geometry"].__setitem__("num_layers", 3), True),
        (lambda e: e["profile"]["measurement"].__setitem__("probe", "another"), False),
        (lambda e: e["profile"].pop("weights_sha256"), True),
        (lambda e: e["profile"]["query_heads_LQ"].pop(), True),
        (lambda e: e["profile"]["query_heads_LQ"][0].__setitem__(0, -1.0), True),
        (lambda e: e["profile"].__setitem__("query_heads_LQ", "none"), True),
        (lambda e: e.pop("profile"), False),
        (lambda e: e.__setitem__("format", "another"), False),
    ],
)
def test_an_altered_profile_is_refused(path: Path, change: Callable[[dict[str, Any]], None], sign: bool) -> None:
    alter(path, change, sign=sign)
    with pytest.raises(kv.IntegrityError, match=r"profile"):
        load_profile(path)


def test_a_file_that_is_cut_or_of_another_version_is_refused(path: Path) -> None:
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    with pytest.raises(kv.IntegrityError, match="truncated"):
        load_profile(path)
    path.write_text(whole)
    alter(path, lambda e: e.__setitem__("format_version", 2))
    with pytest.raises(kv.ConfigError, match="format version 2"):
        load_profile(path)
    with pytest.raises(kv.ConfigError, match="cannot be read"):
        load_profile(path / "nowhere")


def test_another_models_profile_is_refused(model: Any, path: Path) -> None:
    kv.HeadKVCache(model, profile=path, **OPTIONS)
    with pytest.raises(kv.CheckpointAdmissionError, match="kvpolicy calibrate headkv"):
        kv.HeadKVCache(tiny("llama", seed=1), profile=path, **OPTIONS)
    with pytest.raises(kv.CheckpointAdmissionError, match=r"\(2, 4, 2\).*\(3, 4, 2\)"):
        kv.HeadKVCache(tiny("llama", layers=3).config, profile=path, **OPTIONS)


def test_a_cache_made_from_a_config_meets_the_weights_at_its_first_forward(model: Any, path: Path) -> None:
    other = kv.attach(tiny("llama", seed=1))
    cache = kv.HeadKVCache(other.config, profile=path, **OPTIONS)
    with pytest.raises(kv.CheckpointAdmissionError, match="says nothing about another's"), torch.no_grad():
        forward(other, prompt(30), cache)
    assert cache.get_seq_length() == 0
    with torch.no_grad():
        forward(kv.attach(model), prompt(30), cache)
    bound = kv.HeadKVCache(model, profile=path, **OPTIONS)
    with torch.no_grad():
        forward(model, prompt(30), bound)
    assert kept_positions(cache) == kept_positions(bound)
    assert cache.manifest.sha256 == bound.manifest.sha256


def test_a_profile_keeps_more_where_more_was_found(model: Any, path: Path) -> None:
    cache = kv.HeadKVCache(model, profile=path, **OPTIONS)
    with torch.no_grad():
        forward(model, prompt(60), cache)
    # 5 rows x 4 heads in shares of [3, 15, 0, 8] / 26, beside 3 rows of window.
    assert [cache.stored_rows(layer)[0].tolist() for layer in range(2)] == [[3 + 2, 3 + 12], [3 + 0, 3 + 6]]


def test_a_saved_cache_goes_on_without_the_file(model: Any, path: Path, tmp_path: Path) -> None:
    cache = kv.HeadKVCache(model, profile=path, **OPTIONS)
    generate(model, prompt(40), cache)
    cache.save_pretrained(tmp_path / "saved")
    path.unlink()
    loaded = kv.load_cache(tmp_path / "saved", model)
    for one in (cache, loaded):
        with torch.no_grad():
            forward(model, prompt(20, seed=5), one)
    assert kept_positions(loaded) == kept_positions(cache)
    assert loaded.manifest.sha256 == cache.manifest.sha256


def test_the_manifest_names_the_table(model: Any, path: Path) -> None:
    one = kv.HeadKVCache(model, profile=path, **OPTIONS)
    same = kv.HeadKVCache(model, profile=[[0.3, 1.5], [0.0, 0.8]], **OPTIONS)
    other = kv.HeadKVCache(model, profile=[[0.3, 1.5], [0.0, 0.9]], **OPTIONS)
    assert one.manifest.sha256 == same.manifest.sha256 != other.manifest.sha256
    assert one.manifest.selection_contract.options["allocation"]["source"] == sha256_of([[0.3, 1.5], [0.0, 0.8]])


def test_a_fork_keeps_its_table(model: Any, path: Path) -> None:
    cache = kv.HeadKVCache(model, profile=path, **OPTIONS)
    twin = cache.fork()
    for one in (cache, twin):
        with torch.no_grad():
            forward(model, prompt(40), one)
    assert kept_positions(twin) == kept_positions(cache)


def test_nothing_is_shipped_for_random_weights(model: Any) -> None:
    with pytest.raises(kv.CheckpointAdmissionError, match=r"smollm2-135m-instruct.*kvpolicy calibrate headkv"):
        kv.HeadKVCache(model, **OPTIONS)
    cache = kv.HeadKVCache(kv.attach(model).config, **OPTIONS)
    with pytest.raises(kv.CheckpointAdmissionError, match="kvpolicy calibrate headkv"), torch.no_grad():
        forward(model, prompt(9), cache)


def test_a_shipped_profile_is_found_by_weights(model: Any, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = load_profile(path)
    known = (replace(mine, weights_sha256="1" * 64), replace(mine, kind="zigzagkv"), mine)
    monkeypatch.setattr(profiles, "_shipped", lambda: known)
    assert shipped_profile("headkv", model.model) is mine
    shipped = kv.HeadKVCache(model, **OPTIONS)
    given = kv.HeadKVCache(model, profile=path, **OPTIONS)
    for cache in (shipped, given):
        with torch.no_grad():
            forward(model, prompt(40), cache)
    assert kept_positions(shipped) == kept_positions(given)
    assert shipped.composition.options["profile"] == "shipped"


def test_every_shipped_profile_loads() -> None:
    shipped = profiles._shipped()
    assert {"smollm2-135m-instruct"} <= {profile.model for profile in shipped}
    for profile in shipped:
        assert profile.measurement["tests_answered_right"] >= 20


def test_weights_are_the_same_in_bfloat16_and_from_a_folder(model: Any, tmp_path: Path) -> None:
    found = weights_fingerprint(model.model)
    model.save_pretrained(tmp_path)
    for dtype in (torch.float32, torch.bfloat16):
        again = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
        assert weights_fingerprint(again.model) == found
    assert weights_fingerprint(tiny("llama", seed=1).model) != found
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[0, 0] += 0.1
    assert weights_fingerprint(model.model) != found


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("shiped", "Did you mean 'shipped'"),
        ([[1.0, 2.0]], "1 layers of"),
        ([[1.0, 2.0, 3.0]] * 2, "2 layers of 2 KV heads"),
        ([[1.0, 2.0], [1.0]], "one importance for each"),
        ([[0.0, 0.0]] * 2, "not all zero"),
        ([[-1.0, 2.0]] * 2, "non-negative"),
        (3, "a list of importances per layer"),
        ([["a", "b"]] * 2, "a list of importances per layer"),
    ],
)
def test_profiles_that_cannot_be_are_refused(model: Any, profile: Any, words: str) -> None:
    with pytest.raises(kv.ConfigError, match=words):
        kv.HeadKVCache(model, **{**OPTIONS, "profile": profile})


def test_another_kind_of_profile_is_refused(model: Any, tmp_path: Path) -> None:
    save_profile(profile_for(model, "zigzagkv"), tmp_path / "layers.json")
    with pytest.raises(kv.ConfigError, match="a zigzagkv profile"):
        kv.HeadKVCache(model, profile=tmp_path / "layers.json", **OPTIONS)


@pytest.mark.parametrize("beta", [0.5, 0, float("inf"), float("nan"), True, "2"])
def test_a_beta_that_pools_more_than_there_is_is_refused(model: Any, beta: Any) -> None:
    with pytest.raises(kv.ConfigError, match=r"beta is at least 1|beta=.* must be a finite number"):
        kv.HeadKVCache(model, **{**OPTIONS, "beta": beta, "profile": "uniform"})
