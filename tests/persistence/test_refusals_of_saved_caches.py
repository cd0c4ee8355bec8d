"""A save is complete or absent; a load verifies everything before a cache is returned."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import forward, has_budget, make_cache, prompt, small_options, tiny
from safetensors.torch import load_file, save_file

import hf_kvpolicy as kv
from hf_kvpolicy.contract import sha256_of

RECORD, TENSORS = "cache.json", "cache.safetensors"


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Any, Any, Path]:
    model = tiny("llama")
    cache = kv.StreamingLLMCache(model, budget=8, sinks=2)
    with torch.no_grad():
        forward(model, prompt(14, 1), cache)
        forward(model, prompt(1, 2), cache)
    cache.save_pretrained(tmp_path / "cache")
    return model, cache, tmp_path / "cache"


def refuse(place: Path, model: Any, error: type[Exception], match: str) -> None:
    """Check that loading fails with a sentence and leaves an unattached model alone."""
    kv.detach(model)
    implementation = model.config._attn_implementation
    with pytest.raises(error, match=match) as caught:
        kv.load_cache(place, model)
    assert str(caught.value).rstrip().endswith((".", "?")), "a full sentence"
    assert kv.attached_backend(model) is None
    assert model.config._attn_implementation == implementation
    assert not model.model._forward_pre_hooks


def rewritten(place: Path, change: Callable[[dict[str, Any]], Any], *, digest: bool = True) -> None:
    """Alter the record as a careful hand would: with a matching digest."""
    envelope = json.loads((place / RECORD).read_text())
    change(envelope["record"])
    if digest:
        envelope["record_sha256"] = sha256_of(envelope["record"])
    (place / RECORD).write_text(json.dumps(envelope))


def test_missing_files(saved: Any, tmp_path: Path) -> None:
    model, _, place = saved
    refuse(tmp_path / "nowhere", model, kv.ConfigError, "no saved cache")
    refuse(tmp_path, model, kv.ConfigError, "no saved cache")
    for name in (RECORD, TENSORS):
        content = (place / name).read_bytes()
        (place / name).unlink()
        refuse(place, model, kv.IntegrityError, f"lacks the file {name}")
        (place / name).write_bytes(content)
    kv.load_cache(place, model)


@pytest.mark.parametrize("name", [RECORD, TENSORS])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_truncated_files(saved: Any, name: str, share: float) -> None:
    model, _, place = saved
    content = (place / name).read_bytes()
    (place / name).write_bytes(content[: int(share * len(content))])
    refuse(place, model, kv.IntegrityError, "truncated or was altered")


def test_every_altered_byte_of_the_tensors(saved: Any) -> None:
    model, _, place = saved
    content = (place / TENSORS).read_bytes()
    for at in range(0, len(content), len(content) // 17):
        altered = bytearray(content)
        altered[at] ^= 1
        (place / TENSORS).write_bytes(altered)
        refuse(place, model, kv.IntegrityError, "SHA-256 differs")


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r["snapshot"].update(decision_epoch=99),
        lambda r: r["options"].update(budget=9),
        lambda r: r.update(request_id="someone else"),
        lambda r: r["statistics"].update(forwards=0),
    ],
)
def test_an_altered_record(saved: Any, change: Any) -> None:
    model, _, place = saved
    rewritten(place, change, digest=False)
    refuse(place, model, kv.IntegrityError, "digest differs")


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda r: r.update(policy="no_such_policy"), kv.ConfigError, "no policy 'no_such_policy'"),
        (lambda r: r["options"].update(sinkz=3), kv.ConfigError, "sinkz"),
        (lambda r: r["options"].update(budget=9), kv.ManifestError, "selection_contract"),
        (lambda r: r["manifest"].update(policy_manifest_id="x"), kv.ManifestError, "policy_manifest_id"),
        (lambda r: r.update(manifest_sha256="0" * 64), kv.ManifestError, "digest"),
        (lambda r: r["geometry"].update(num_layers=9), kv.ConfigError, "num_layers 9"),
        (lambda r: r.update(model_dtype="float16"), kv.ConfigError, "dtype=torch.float16"),
        (lambda r: r["manifest"].update(checkpoint_generation="0" * 64), kv.CheckpointAdmissionError, "other weights"),
        (lambda r: r["snapshot"].pop("counts"), kv.IntegrityError, "counts"),
        (lambda r: r["snapshot"].update(counts=[7]), kv.IntegrityError, "contradicts itself"),
        (lambda r: r["snapshot"].update(counts=[8, 8]), kv.IntegrityError, "one and the same cache"),
        (lambda r: r["snapshot"]["frontier"].update(tokens=[3]), kv.IntegrityError, "contradicts itself"),
        (lambda r: r["snapshot"].update(capacities=[1, 1]), kv.IntegrityError, "contradict"),
        (lambda r: r["snapshot"].update(capacities="no"), kv.IntegrityError, "wrong form|lacks"),
        (lambda r: r["snapshot"].update(maps_ordered=[True, True]), kv.IntegrityError, "lacks the tensor"),
        (lambda r: r["snapshot"].update(maps_ordered=[]), kv.IntegrityError, "does not explain"),
        (lambda r: r["snapshot"]["generations"].update(cache=-1), kv.KVPolicyError, "generation cache"),
        (lambda r: r["statistics"].update(extra=1), kv.IntegrityError, "wrong form"),
        (lambda r: r["tensors"].pop("map.0.live"), kv.IntegrityError, "other tensors"),
        (lambda r: r.pop("tensor_file_sha256"), kv.IntegrityError, "tensor_file_sha256"),
    ],
)
def test_a_contradicting_record(saved: Any, change: Any, error: type[Exception], match: str) -> None:
    model, _, place = saved
    rewritten(place, change)
    refuse(place, model, error, match)


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: blocks["coded"].reverse(),
        lambda blocks: blocks["blocks"].reverse(),
        lambda blocks: blocks["blocks"].pop(),
        lambda blocks: blocks.update(coded=[blocks["coded"][0] + 1, *blocks["coded"][1:]]),
        lambda blocks: blocks.update(block_rows=3),
        lambda blocks: blocks.update(bits=4),
        lambda blocks: blocks.pop("coded"),
    ],
)
def test_blocks_that_contradict_their_owners(tmp_path: Path, change: Any) -> None:
    model, place = tiny("llama"), tmp_path / "cache"
    cache = kv.AdaKVCache(model, budget=20, window=3, alpha=1.0, quantize="int8", block_rows=2)
    with torch.no_grad():
        forward(model, prompt(30, 1), cache)
        forward(model, prompt(1, 2), cache)
        forward(model, prompt(7, 3), cache)
    cache.save_pretrained(place)
    layers = json.loads((place / RECORD).read_text())["record"]["snapshot"]["ragged"]
    layer = next(i for i, facts in enumerate(layers) if len(set(facts["coded"])) > 1 < len(set(facts["blocks"])))
    rewritten(place, lambda record: change(record["snapshot"]["ragged"][layer]))
    refuse(place, model, kv.IntegrityError, "contradict|does not explain|wrong form|lacks")


def test_tensors_that_contradict_the_counts(saved: Any) -> None:
    from hf_kvpolicy.persistence.files import described, file_sha256

    model, _, place = saved
    tensors = {name: tensor.clone() for name, tensor in load_file(place / TENSORS).items()}
    tensors["map.0.tokens"][0, 0, 3] = 77
    save_file(tensors, place / TENSORS)
    change = {"tensor_file_sha256": file_sha256(place / TENSORS), "tensors": described(tensors)}
    rewritten(place, lambda record: record.update(change))
    refuse(place, model, kv.IntegrityError, "contradicts itself")


def test_unknown_format(saved: Any) -> None:
    model, _, place = saved
    envelope = json.loads((place / RECORD).read_text())
    (place / RECORD).write_text(json.dumps({**envelope, "format_version": 2}))
    refuse(place, model, kv.ConfigError, "format version 2")
    (place / RECORD).write_text(json.dumps({**envelope, "format": "other"}))
    refuse(place, model, kv.IntegrityError, "not the record")
    (place / RECORD).write_text("[1, 2]")
    refuse(place, model, kv.IntegrityError, "not the record")


def test_another_model(saved: Any) -> None:
    _, _, place = saved
    refuse(place, tiny("llama", seed=1), kv.CheckpointAdmissionError, "other weights")
    refuse(place, tiny("llama", layers=3), kv.ConfigError, "num_layers 2")
    refuse(place, tiny("mistral"), kv.ConfigError, "model_type")
    refuse(place, tiny("llama_head_dim"), kv.ConfigError, "key_dim")
    refuse(place, tiny("llama").to(torch.bfloat16), kv.ConfigError, "bfloat16")
    with pytest.raises(kv.UnsupportedModelError):
        kv.load_cache(place, torch.nn.Linear(2, 2))


def test_the_same_weights_elsewhere(saved: Any, tmp_path: Path) -> None:
    """Saving and loading the model, attaching and the attention backend do not change the checkpoint's identity."""
    from transformers import AutoModelForCausalLM

    model, cache, place = saved
    kv.detach(model)
    model.save_pretrained(tmp_path / "model")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model", attn_implementation="eager").eval()
    loaded = kv.load_cache(place, again)
    assert kv.attached_backend(again) == "eager"
    assert loaded.manifest == cache.manifest


@pytest.mark.parametrize(
    "change",
    [
        lambda pair: pair.update(slots=3),
        lambda pair: pair.update(keys_entries=0),
        lambda pair: pair.update(layers=[1, 2]),
        lambda pair: pair.pop("values_entries"),
    ],
)
def test_stores_of_layer_pairs_that_contradict_their_record(change: Any, tmp_path: Path) -> None:
    model, place = tiny("llama"), tmp_path / "cache"
    cache = kv.MiniCache(model, start_layer=0, retention=0.5)
    with torch.no_grad():
        forward(model, prompt(14, 1), cache)
    cache.save_pretrained(place)
    kv.load_cache(place, model)
    kv.detach(model)
    rewritten(place, lambda record: change(record["snapshot"]["pairs"][0]))
    with pytest.raises(kv.IntegrityError):
        kv.load_cache(place, model)


@pytest.mark.parametrize("name", ["full", "snapkv", "streaming_llm", "minicache", "dmc"])
def test_waiting_tokens_are_not_accepted_by_saving(name: str, tmp_path: Path) -> None:
    model = tiny("llama")
    cache = make_cache(name, model, **(small_options(name) | ({"budget": 40} if has_budget(name) else {})))
    forward(model, prompt(9, 1), cache)
    cache.activate_past_recording()
    forward(model, prompt(3, 2), cache)
    with pytest.raises(kv.ConfigError, match=r"crop\(0\)"):
        cache.save_pretrained(tmp_path / "cache")
    assert not list(tmp_path.iterdir())
    cache.crop(0)
    cache.save_pretrained(tmp_path / "cache")
    assert kv.load_cache(tmp_path / "cache", model).is_recording_past()


def test_a_forward_in_flight_is_not_saved(saved: Any, tmp_path: Path) -> None:
    model, cache, _ = saved
    handle = model.lm_head.register_forward_pre_hook(lambda *_: None)
    handle.remove()
    caught: list[Exception] = []

    def save(*_: Any) -> None:
        try:
            cache.save_pretrained(tmp_path / "other")
        except kv.ConfigError as error:
            caught.append(error)

    handle = model.model.layers[0].mlp.register_forward_hook(save)
    forward(model, prompt(1, 3), cache)
    handle.remove()
    assert "rollback()" in str(caught[0])
    assert not (tmp_path / "other").exists()
    cache.save_pretrained(tmp_path / "other")


def test_an_unnameable_rule_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    from transformers.masking_utils import chunked_overlay

    from hf_kvpolicy.masks import MaskRecord
    from hf_kvpolicy.persistence.codec import encode

    model = tiny("llama")
    cache = kv.SnapKVCache(model, budget=8, window=3, chunked_prefill="hold")
    forward(model, prompt(12, 1), cache)
    snapshot = cache._runtime.snapshot
    padding = torch.zeros(1, dtype=torch.long)
    rules = [
        MaskRecord("sdpa", {"mask_function": chunked_overlay(7, padding), "local_size": 7}),
        MaskRecord("sdpa", {"mask_function": lambda b, h, q, k: k <= q + 1, "local_size": None}),
        MaskRecord("sdpa", {"mask_function": lambda b, h, q, k: k <= q, "local_size": 7, "use_vmap": True}),
    ]
    for rule in rules:
        with pytest.raises(kv.ConfigError, match=r"finish_prefill\(\)"):
            encode(replace(snapshot, open_segment=replace(snapshot.open_segment, rule=rule)))


def test_a_policy_that_cannot_be_rebuilt_is_refused(tmp_path: Path) -> None:
    class Mine(kv.SnapKVCache):
        """A subclass nobody registered."""

    model = tiny("llama")
    with pytest.raises(kv.ConfigError, match="register_policy"):
        Mine(model, budget=8, window=3).save_pretrained(tmp_path / "cache")
    cache = kv.SnapKVCache(model.config, budget=8, window=3)
    with pytest.raises(kv.ConfigError, match="dtype"):
        cache.save_pretrained(tmp_path / "cache")
    gone = kv.SnapKVCache(tiny("llama"), budget=8, window=3)
    import gc

    gc.collect()
    with pytest.raises(kv.ConfigError):
        gone.save_pretrained(tmp_path / "cache")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("at", ["save_file", "json", "rename"])
def test_a_failed_save_changes_nothing(saved: Any, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvpolicy.persistence import save

    model, cache, place = saved
    before = {file.name: file.read_bytes() for file in place.iterdir()}
    forward(model, prompt(1, 9), cache)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device.")

    if at == "rename":
        real = Path.rename

        def rename(self: Path, target: Any) -> Path:
            if self.name.endswith(".tmp"):
                fail()
            return real(self, target)

        monkeypatch.setattr(Path, "rename", rename)
    else:
        monkeypatch.setattr(save, "save_file" if at == "save_file" else "file_sha256", fail)
    for target in (place, place.with_name("fresh")):
        with pytest.raises(OSError, match="No space"):
            cache.save_pretrained(target)
    monkeypatch.undo()
    assert {file.name: file.read_bytes() for file in place.iterdir()} == before
    assert [found.name for found in place.parent.iterdir()] == ["cache"], "nothing half-written stays"
    cache.save_pretrained(place)
    assert kv.load_cache(place, model).get_seq_length() == 16


def test_nothing_else_is_replaced(saved: Any, tmp_path: Path) -> None:
    _, cache, place = saved
    (place / "notes.txt").write_text("mine")
    with pytest.raises(kv.ConfigError, match="not a saved cache"):
        cache.save_pretrained(place)
    file = tmp_path / "file"
    file.write_text("mine")
    with pytest.raises(kv.ConfigError, match="not a saved cache"):
        cache.save_pretrained(file)
    (tmp_path / "empty").mkdir()
    cache.save_pretrained(tmp_path / "empty")
    cache.save_pretrained(tmp_path / "deep" / "er" / "cache")
    assert {p.name for p in (tmp_path / "deep" / "er").iterdir()} == {"cache"}
    assert (place / "notes.txt").read_text() == "mine"


def test_every_option_is_recorded() -> None:
    """What a policy's constructor takes is in its manifest, and so in a save."""
    from helpers import policies, small_options

    from hf_kvpolicy.config import policy_options

    for name in policies():
        model = tiny("llama")
        cache = make_cache(name, model, **small_options(name))
        recorded = cache.manifest.selection_contract.options
        missing = [option for option in policy_options(name) if option not in recorded]
        assert not missing, f"{name} does not record {missing}"
