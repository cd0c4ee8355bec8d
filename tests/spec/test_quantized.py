"""Older rows in few bits: attention and choices see what is read back, and what it costs is counted to the byte."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    case_id,
    content,
    forward,
    generate,
    kept_positions,
    left_padded,
    prompt,
    quantized_units,
    tiny,
)
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.storage import DenseRows, RaggedRows
from hf_kvpolicy.storage.coded import CodedRows

from ._quantized import BLOCK, CASES, OPTIONS, RAGGED, quantized, rows_of


def held_as_read(cache: Any, model: Any, name: str, options: dict[str, Any]) -> Any:
    """Return a cache of the same policy that holds in full precision what this one reads."""
    plain = kv.make_cache(name, model, **OPTIONS[name] | options)
    snapshot, read, ragged = cache._runtime.snapshot, [], []
    for layer in snapshot.ragged:
        flat = layer.rows.flat()
        held = RaggedRows.allocate(*flat, layer.rows.capacities, layer.rows.heads)
        held.keys_ND.copy_(flat[0])
        held.values_ND.copy_(flat[1])
        ragged.append(replace(layer, rows=held))
    for rows in snapshot.rows:
        keys, values = (part.clone() for part in rows.view(snapshot.width))
        pinned = rows.pinned_keys_BSPD
        read.append(DenseRows(keys_BSCD=keys, values_BSCD=values, pinned_keys_BSPD=pinned))
    become(plain, cache, replace(snapshot, rows=tuple(read), ragged=tuple(ragged)))
    return plain


def become(cache: Any, origin: Any, snapshot: Any) -> None:
    """Hold a snapshot, as a cache does that is loaded."""
    runtime = origin._runtime
    cache._runtime.restore(
        snapshot,
        highest=runtime.clock.highest,
        parent=runtime.parent,
        statistics=runtime.statistics,
        recording=False,
        recorded_any=False,
    )


@pytest.mark.proves("quantized")
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_attention_and_choices_see_what_is_read(case: tuple[str, dict[str, Any]], family: str, bits: str) -> None:
    """Each forward equals that of a cache which holds what is read back, as it is: logits, and the rows that stay."""
    name, options = case
    model = tiny(family)
    cache = quantized(name, model, bits, **options)
    coded = 0
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step, width in enumerate([1] * 18 + [7] + [1] * 6):
            plain, ids = held_as_read(cache, model, name, options), prompt(width, step)
            expected = forward(model, ids, plain)
            torch.testing.assert_close(forward(model, ids, cache), expected, atol=1e-5, rtol=1e-4)
            assert kept_positions(cache) == kept_positions(plain)
            cache.check_integrity()
            coded = max(coded, *(rows.coded_slots for rows in rows_of(cache)))
    assert coded >= 8


@pytest.mark.parametrize("case", [c for c in CASES if c[0] not in ("full", *RAGGED)], ids=case_id)
@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_every_row_is_near_what_the_model_made(case: tuple[str, dict[str, Any]], bits: str) -> None:
    """Rows of the first layer depend on tokens alone: after a prompt each is off by half a step, as is its channel."""
    name, options = case
    model = tiny("llama")
    cache, full = quantized(name, model, bits, **options | small_positions(name)), kv.FullCache(model)
    with torch.no_grad():
        for each in (cache, full):
            forward(model, prompt(40), each)
    rows, snapshot = rows_of(cache)[0], cache._runtime.snapshot
    assert isinstance(rows, CodedRows)
    table = snapshot.full_map(0)
    made = rows_of(full)[0].view(40)
    for part, read, blocks in zip(made, rows.view(snapshot.width), (rows.key_blocks, rows.value_blocks), strict=True):
        repeats = read.shape[1] // part.shape[1]
        for head in range(read.shape[1]):
            mapped = head if table.map_heads > 1 else 0
            tokens = table.tokens_BMW[0, mapped].long()
            off = (read[0, head] - part[0, head // repeats, tokens]).abs()
            steps = blocks.scales[0, head].expand(-1, BLOCK, blocks.dim).reshape(-1, blocks.dim)
            live = table.live_BMW[0, mapped]
            coded = slice(rows.pinned, rows.pinned + rows.coded_slots)
            assert (off[coded][live[coded]] <= steps[live[coded]] / 2 + 1e-5).all()
            off[coded] = 0
            assert not off[live].any(), "the newest rows are as they were"


def small_positions(name: str) -> dict[str, Any]:
    return {"positions": "original"} if name == "streaming_llm" else {}


def test_sinks_are_not_quantized() -> None:
    model = tiny("llama")
    cache, plain = (
        quantized("streaming_llm", model, "int4"),
        kv.make_cache("streaming_llm", model, **OPTIONS["streaming_llm"]),
    )
    for each in (cache, plain):
        generate(model, prompt(40), each, 12)
    for ours, theirs in zip(rows_of(cache)[:1], rows_of(plain)[:1], strict=True):
        assert isinstance(ours, CodedRows)
        assert ours.pinned == 5
        kept = [0, 1, 2, 3]  # three sinks and token 9: none is a token that was generated
        assert torch.equal(ours.pinned_keys_BSPD[:, :, kept], theirs.pinned_keys_BSPD[:, :, kept])
        assert torch.equal(ours.values_BSCD[:, :, kept], theirs.values_BSCD[:, :, kept])


# -- transactions and life --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", quantized_units(), ids=case_id)
def test_padded_rows_over_the_budget_equal_each_alone(case: tuple[str, dict[str, Any]]) -> None:
    """Where every row of a batch fills its budget, blocks lie as they do alone; elsewhere they hold other rows."""
    if case[0] == "full":
        pytest.skip("nothing bounds its rows, so that blocks lie at other rows than alone")
    name, options = case
    model, prompts = tiny("llama"), [prompt(n, seed=n) for n in (30, 14, 21)]
    batch = kv.make_cache(name, model, **options)
    ids, mask = left_padded(prompts)
    together = generate(model, ids, batch, 9, attention_mask=mask)[:, ids.shape[1] :]
    for row, alone in enumerate(prompts):
        solo = kv.make_cache(name, model, **options)
        assert torch.equal(generate(model, alone, solo, 9)[0, alone.shape[1] :], together[row])
        assert kept_positions(batch, row) == kept_positions(solo)


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_crop_takes_back_what_came_after_the_last_block(name: str) -> None:
    model = tiny("llama")
    cache, never = quantized(name, model), quantized(name, model)
    with torch.no_grad():
        for each in (cache, never):
            forward(model, prompt(39), each)
        while cache._runtime.snapshot.evicted_at_column != cache.get_seq_length() or cache.get_seq_length() < 41:
            forward(model, prompt(1, 1), cache)
            forward(model, prompt(1, 1), never)
        for step in range(BLOCK - 1):
            forward(model, prompt(1, 2 + step), cache)
        cache.crop(-(BLOCK - 1))
        for step in range(6):
            ids = prompt(1, 20 + step)
            assert torch.equal(forward(model, ids, cache), forward(model, ids, never))
        with pytest.raises(kv.StaleGenerationError, match=r"quantized or merged for good .*activate_past_recording"):
            cache.crop(-(2 * BLOCK))
    cache.check_integrity()


@pytest.mark.parametrize("name", ["snapkv", "random", "sliding_window", "streaming_llm", "adakv", "headkv", "zigzagkv"])
@pytest.mark.parametrize("lengths", [(4,), (4, 2, 3)], ids=["alone", "padded"])
@pytest.mark.parametrize("taken_back", [1, 3])
def test_what_was_taken_back_takes_no_place_among_rows_that_stay_as_they_are(
    name: str, lengths: tuple[int, ...], taken_back: int
) -> None:
    """A turn that was kept whole, or a token, and is cropped: rows are coded when they are without it."""
    model = tiny("llama")
    cache, never = (quantized(name, model, budget=64) for _ in range(2))
    ids, mask = left_padded([prompt(length, seed=length) for length in lengths])
    with torch.no_grad():
        for each in (cache, never):
            forward(model, ids, each, attention_mask=mask)
        forward(model, prompt(taken_back, 1, rows=len(lengths)), cache)
        cache.crop(-taken_back)
        for step in range(3 * BLOCK):
            fed = prompt(1, 20 + step, rows=len(lengths))
            torch.testing.assert_close(forward(model, fed, cache), forward(model, fed, never), atol=1e-5, rtol=1e-4)
    cache.check_integrity()


def test_waiting_tokens_are_not_quantized() -> None:
    model = tiny("llama")
    cache = quantized("full", model)
    cache.activate_past_recording()
    forward(model, prompt(30), cache)
    forward(model, prompt(9), cache)
    assert cache._runtime.waiting.snapshot.rows[0].coded_slots < 32
    cache.crop(-9)
    assert rows_of(cache)[0].coded_slots == 24
    cache.check_integrity()


def test_a_store_of_another_precision_is_unsound(tmp_path: Path) -> None:
    model = tiny("llama")
    cache = quantized("snapkv", model)
    generate(model, prompt(40), cache, 3)
    for options in ({"quantize": "int4", "block_rows": BLOCK}, {"quantize": "int8", "block_rows": 2}, {}):
        other = kv.make_cache("snapkv", model, **OPTIONS["snapkv"] | options)
        assert other.manifest != cache.manifest
        become(other, cache, cache._runtime.snapshot)
        with pytest.raises(kv.IntegrityError, match="coded in 8 bits"):
            other.check_integrity()
    cache.save_pretrained(tmp_path / "cache")
    assert kv.load_cache(tmp_path / "cache", model).manifest == cache.manifest


# -- what it means, and what is refused -------------------------------------------------------------------------------


def test_the_manifest_names_what_is_quantized() -> None:
    config = tiny("llama").config
    model = tiny("llama")
    record = quantized("snapkv", model, "int4").manifest.to_dict()["representation_contract"]
    assert record == {
        "rows": "quantized_rows",
        "semantic_class": "lossy_subset",
        "consumer_schema": None,
        "quantization": {
            "code": "int4",
            "block_rows": BLOCK,
            "key_groups": "channel_of_block",
            "value_groups": "row",
            "parameter_dtype": "float32",
            "full_precision_rows": BLOCK,
            "full_precision_sinks": False,
        },
    }
    full = quantized("full", model)
    assert full.manifest.representation_contract.semantic_class == "lossy_quantized"
    forward(model, prompt(9), full)
    with pytest.raises(kv.ManifestError, match="lossy_quantized"):
        full.prefix_digest(range(9))
    plain = kv.SnapKVCache(model, budget=8, window=3).manifest.to_dict()["representation_contract"]
    assert "quantization" not in plain
    manifest = quantized("snapkv", model).manifest
    assert type(manifest).from_dict(manifest.to_dict()) == manifest
    assert kv.make_cache("snapkv", config, budget=8, window=3).composition.representation.name == "original_kv_rows"


@pytest.mark.proves("quantized", policy="minicache", family="llama", refused=True)
def test_merged_rows_are_not_quantized() -> None:
    with pytest.raises(kv.ManifestError, match="directions, magnitudes and exceptions"):
        kv.MiniCache(tiny("llama").config, quantize="int4")


@pytest.mark.parametrize("name", ["full", "snapkv"])
def test_wrong_options(name: str) -> None:
    config, options = tiny("llama").config, OPTIONS[name]
    for wrong, match in (
        ({"quantize": "int2"}, r"quantize='int2' is unknown; allowed are .* Did you mean"),
        ({"quantize": "int8", "block_rows": 0}, "block_rows is a number of rows from 1 on; got 0"),
        ({"quantize": "int8", "block_rows": -4}, "Give 32 or 64"),
    ):
        with pytest.raises(kv.ConfigError, match=match):
            kv.make_cache(name, config, **options | wrong)
    with pytest.raises(kv.BudgetError, match="Give rows, or a share of the prompt"):
        kv.SnapKVCache(config, budget="1MiB", quantize="int8")


# -- rows that are not finite -----------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("name", ["full", "snapkv", "adakv"])
def test_one_bad_token_spoils_one_row(name: str, bits: str, tmp_path: Path) -> None:
    """A token whose embedding is not finite has the first layer's only bad row, as in a cache that codes nothing."""
    model, bad = tiny("llama"), 5
    model.get_input_embeddings().weight[bad] = torch.inf
    ids = prompt(40).masked_fill(prompt(40) == bad, 6)
    ids[0, 30] = bad
    caches = quantized(name, model, bits), kv.make_cache(name, model, **OPTIONS[name])
    for cache in caches:
        forward(model, ids[:, :28], cache)
        for column in range(28, 40):
            forward(model, ids[:, column : column + 1], cache)
    caches[0].check_integrity()
    caches[0].save_pretrained(tmp_path / "saved")
    for cache in (caches[0], kv.load_cache(tmp_path / "saved", model)):
        read, plain = content(cache), content(caches[1])
        for key in (key for key in plain if key.startswith(("keys 0", "values 0"))):
            tokens = plain["tokens" + key[key.index(" ") :]]
            is_bad = torch.tensor([token == 30 for token in tokens])
            assert torch.equal(~plain[key].isfinite().all(-1), is_bad)
            assert torch.equal(~read[key].isfinite().all(-1), is_bad)
            spread = plain[key][~is_bad].amax() - plain[key][~is_bad].amin()
            error = (plain[key] - read[key])[~is_bad].abs().max()
            assert error <= spread / (2 ** (8 if bits == "int8" else 4) - 2) / 2 + 1e-5


# -- what it costs ----------------------------------------------------------------------------------------------------


def wide(head_dim: int) -> Any:
    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=head_dim, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize(("bits", "head_dim", "least"), [("int4", 64, 18), ("int4", 128, 18), ("int8", 64, 11)])
def test_bytes_right_after_a_long_prompt(bits: str, head_dim: int, least: float) -> None:
    """SnapKV 512 of 4,096 tokens: what is held against the full cache, by formula and as measured."""
    model, tokens, kept, block = wide(head_dim), 4096, 512, 32
    cache = kv.SnapKVCache(model, budget=kept, quantize=bits)
    with torch.inference_mode():
        forward(model, prompt(tokens), cache, logits_to_keep=1)
    ledger, owners = cache.ledger(), 2
    residual = 32
    coded = kept - residual
    codes = coded * 2 * head_dim * (1 if bits == "int8" else 0.5)
    scales = 2 * 2 * head_dim * coded // block + 2 * 2 * coded
    payload = owners * (codes + scales + residual * 2 * head_dim * 2)
    full = owners * tokens * 2 * head_dim * 2
    assert ledger.payload_bytes == payload
    assert ledger.full_payload_bytes == full
    # Columns and token positions, int32 each, and a byte that says that a row lives.
    maps = ledger.positions_bytes + ledger.validity_bytes
    assert maps == owners * kept * (4 + 4 + 1)
    assert ledger.declared_bytes == ledger.measured_bytes == payload + maps + ledger.slack_bytes
    assert ledger.slack_bytes == owners * (2 * block - residual) * 2 * head_dim * 2
    assert full / (payload + maps) >= least
