"""Older rows in few bits: attention and choices see what is read back, and what it costs is counted to the byte."""

from __future__ import annotations

from collections import Counter
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
from hf_kvpolicy.storage import DenseRows, RaggedRows, growth_slots
from hf_kvpolicy.storage.coded import CodedRows

BLOCK = 4
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "snapkv": {"budget": 24, "window": 4, "kernel_size": 3},
    "random": {"budget": 24, "window": 4},
    "sliding_window": {"budget": 24},
    "streaming_llm": {"budget": 24, "sinks": 3, "protect": [9, 45]},
    "h2o": {"budget": 24, "recent_ratio": 0.25},
    "keyformer": {"budget": 24, "recent_ratio": 0.25},
    "scissorhands": {"budget": 24, "recent": 4, "history": 12},
    "adakv": {"budget": 24, "window": 4, "kernel_size": 3, "alpha": 0.8},
    "pyramidkv": {"budget": 24, "window": 4, "kernel_size": 3, "beta": 4},
    "headkv": {"budget": 24, "window": 4, "kernel_size": 3, "profile": [[1.0, 6.0], [3.0, 0.0]]},
    "zigzagkv": {"budget": 24, "window": 4, "kernel_size": 3},
    "fastgen": {"budget": 24, "recovery": 0.7, "sinks": 2, "punctuation_token_ids": range(20, 32)},
    "pyramidinfer": {"budget": 24, "decay": 0.6, "sinks": 2, "min_context": 2, "decode_block": 3, "decode_ratio": 0.5},
}
UNITS = [("h2o", {"unit": "layer"}), ("h2o", {"unit": "token"}), ("snapkv", {"owner": "query_head"})]
RAGGED = ("adakv", "pyramidkv", "headkv", "zigzagkv", "fastgen", "pyramidinfer")
# Policies that a budget binds only when a prompt ends.
UNBOUNDED = ("snapkv", "random")
CASES = [*((name, {}) for name in OPTIONS), *UNITS]


def quantized(name: str, model: Any, bits: str = "int8", **options: Any) -> Any:
    return kv.make_cache(name, model, **OPTIONS[name] | options | {"quantize": bits, "block_rows": BLOCK})


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


def rows_of(cache: Any) -> tuple[Any, ...]:
    snapshot = cache._runtime.snapshot
    return snapshot.rows or tuple(layer.rows for layer in snapshot.ragged)


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


# -- blocks that are used again ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h2o", "keyformer", "sliding_window", "streaming_llm"])
def test_blocks_do_not_pile_up(name: str) -> None:
    model = tiny("llama")
    cache, most = quantized(name, model), 0
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step in range(150):
            forward(model, prompt(1, step), cache)
            most = max(most, rows_of(cache)[0].coded_slots // BLOCK)
    cache.check_integrity()
    # All blocks of an owner but one are more than half live where another is added.
    assert most <= 24 // (BLOCK // 2 + 1) + 2
    if name == "sliding_window":
        assert most <= 24 // BLOCK + 1
    assert cache.ledger().payload_rows == 2 * 2 * 24


def most_blocks(rows: int) -> int:
    """Return how many blocks an owner of so many rows may have: all but one are more than half full as one is made."""
    return rows // (BLOCK // 2 + 1) + 1


def blocks_of_tokens(cache: Any) -> dict[tuple[int, int, int], int]:
    """Return the block in which a row of a layer, owner and token lies."""
    found, snapshot = {}, cache._runtime.snapshot
    for index, rows in enumerate(snapshot.rows):
        table = snapshot.full_map(index)
        coded = slice(rows.pinned, rows.residual) if isinstance(rows, CodedRows) else slice(0)
        live, tokens = (part[0, :, coded] for part in (table.live_BMW, table.tokens_BMW))
        for head in range(cache.geometry.num_kv_heads):
            own = head % table.map_heads
            for slot in live[own].nonzero()[:, 0].tolist():
                found[index, head, int(tokens[own, slot])] = slot // BLOCK
    for index, layer in enumerate(snapshot.packed().ragged):
        if not layer.rows.coded_slots:
            continue
        blocks = layer.rows.blocks
        places = blocks.places().split(list(blocks.slots))
        for owner, part in enumerate(layer.map.owners()):
            tokens = part.tokens_BMW[0, 0].tolist()
            # Behind them lie the tail's rows, none of which is dropped here.
            found |= {(index, owner, token): int(at) // BLOCK for token, at in zip(tokens, places[owner], strict=False)}
    return found


def accept(cache: Any, model: Any, width: int, step: int) -> None:
    """Feed a draft of which one token is rejected."""
    cache.activate_past_recording()
    forward(model, prompt(width + 1, step), cache)
    cache.crop(-1)
    cache.set_recording(False)


@pytest.mark.parametrize("name", [name for name in OPTIONS if name != "full"])
def test_what_stays_in_a_block_is_coded_once(name: str) -> None:
    """Decoding, accepting, the next turn and packing leave a row's codes alone, unless its block is half empty then."""
    model, again = tiny("llama"), 0
    cache = quantized(name, model, "int4")
    turns = [(width, width > 1) for width in [*[1] * 24, 6, *[1] * 9, 5, *[1] * 9]]
    # Nothing waits for acceptance where the tokens of an answer are chosen from.
    drafts = [] if name == "pyramidinfer" else [(width, None) for width in [1, 3, 2, 1, 4, 1, 1, 3] * 6]
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step, (width, plain) in enumerate([*turns, *drafts, (1, False), (30, True)]):
            before, was = blocks_of_tokens(cache), content(cache)
            if plain is None:
                accept(cache, model, width, step)
            else:
                forward(model, prompt(width, step), cache)
            now = content(cache)
            heads = cache.geometry.num_kv_heads
            left = [key for key in before if key[2] in now[f"tokens {key[0]} 0 {key[1] % heads}"]]
            stays = Counter((layer, owner, before[layer, owner, token]) for layer, owner, token in left)
            for layer, owner, token in left:
                where = f"{layer} 0 {owner % heads}"
                old, new = (held[f"tokens {where}"].index(token) for held in (was, now))
                same = torch.equal(was[f"keys {where}"][old], now[f"keys {where}"][new])
                again += not same
                assert same or stays[layer, owner, before[layer, owner, token]] <= BLOCK // 2
            for rows in cache._runtime.snapshot.rows:
                assert rows.coded_slots <= (24 // (BLOCK // 2 + 1) + 2) * BLOCK or name in UNBOUNDED
    cache.check_integrity()
    if name == "pyramidinfer":
        assert again, "some blocks were repacked"


@pytest.mark.parametrize("precision", ["int4", "int8"])
@pytest.mark.parametrize(("budget", "draft"), [(36, 1), (36, 3), (29, 1), (24, 7), (20, 19), (29, None)])
def test_sinks_do_not_drift(budget: int, draft: int | None, precision: str) -> None:
    """Rows that stay for good lie in a block whose other rows have died: it is left alone, however long it takes.

    Also where it is at most half live, and so is the next one whenever a block is due: by drafts, or without any.
    """
    model = tiny("llama")
    cache = kv.StreamingLLMCache(
        model, budget=budget, sinks=4, positions="original", quantize=precision, block_rows=2 * BLOCK
    )
    with torch.no_grad():
        forward(model, prompt(50), cache)
        accept(cache, model, 8, 0)
        first = content(cache)
        for step in range(120):
            if draft is None:
                forward(model, prompt(1, step), cache)
            else:
                accept(cache, model, draft, step)
            now = content(cache)
            for key in (key for key in now if key.startswith(("keys", "values"))):
                assert torch.equal(first[key][:4], now[key][:4])
            assert rows_of(cache)[0].coded_slots // (2 * BLOCK) <= budget // (BLOCK + 1) + 2


@pytest.mark.parametrize("name", RAGGED)
def test_bytes_of_ragged_blocks_stay_bounded(name: str) -> None:
    """Many short turns and answers: what dropped rows leave behind is given up."""
    model, most_rows = tiny("llama"), 0
    cache = quantized(name, model)
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step in range(96):
            forward(model, prompt(5 if step % 16 == 15 else 1, step), cache)
            for layer in cache._runtime.snapshot.ragged:
                if not layer.rows.coded_slots:
                    continue
                rows = [n + cache._runtime.snapshot.tail_width for n in layer.map.lengths]
                most_rows = max(most_rows, *rows)
                assert max(layer.rows.blocks.counts) <= most_blocks(most_rows)
                # A residual and its slack.
                assert layer.rows.plain().slots <= len(rows) * growth_slots(3 * BLOCK)
    ledger = cache.ledger()
    assert most_rows <= 24 * 2 + 16, "the budget, what its owner is given more, and one answer"
    assert ledger.declared_bytes == ledger.measured_bytes


@pytest.mark.parametrize("limit", [None, 24])
def test_fastgen_decodes_long_without_a_leak(limit: int | None) -> None:
    """At every step rows die in blocks: slots are those of the rows that live, twice over, and of a residual."""
    model = tiny("llama")
    cache = quantized("fastgen", model, budget=limit)
    # Codes of keys and values, scale and zero of values; scales and zeros of a block's keys; a row that is not coded.
    coded_bytes, block_bytes, plain_bytes = 2 * 8 + 2 * 4, 2 * 8 * 4, 2 * 8 * 4
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for step in range(160):
            forward(model, prompt(1, step), cache)
            ledger, most = cache.ledger(), 0
            assert ledger.declared_bytes == ledger.measured_bytes
            for layer in cache._runtime.snapshot.ragged:
                # Up to two blocks of rows may have died since blocks were repacked.
                rows = [n + 2 * BLOCK if limit is None else limit for n in layer.map.lengths]
                blocks = [most_blocks(n) for n in rows]
                assert all(a <= b for a, b in zip(layer.rows.blocks.counts, blocks, strict=True))
                most += sum(blocks) * (BLOCK * coded_bytes + block_bytes) + 4 * sum(rows)
                most += len(rows) * growth_slots(3 * BLOCK) * plain_bytes
            assert ledger.payload_bytes + ledger.slack_bytes <= most


@pytest.mark.parametrize("name", ["h2o", "keyformer", "scissorhands", "fastgen"])
def test_bytes_stay_bounded_while_drafts_are_accepted(name: str) -> None:
    """300 tokens of an answer, drafted five at a time and some of them rejected, a token without a draft at times."""
    model, budget, draft = tiny("llama"), 24, 5
    cache = quantized(name, model)
    owners, accepted = 2, 0
    coded_bytes, block_bytes, plain_bytes = 2 * 8 + 2 * 4, 2 * 8 * 4, 2 * 8 * 4
    blocks = most_blocks(budget) + 1
    most = blocks * (BLOCK * coded_bytes + block_bytes) + growth_slots(3 * BLOCK) * plain_bytes + 4 * budget
    with torch.no_grad():
        forward(model, prompt(40), cache)
        for cycle in range(100):
            cache.activate_past_recording()
            forward(model, prompt(draft, cycle), cache)
            ledger, rejected = cache.ledger(), 7 * cycle % draft
            assert ledger.declared_bytes == ledger.measured_bytes
            frontier = cache._runtime.waiting.snapshot.frontier
            per_column = sum(part is not None for part in (frontier.seen_BF, frontier.kinds_BF))
            # Rows as they are with numbers and states, and the queries of the draft.
            held = 2 * owners * growth_slots(budget + draft) * (plain_bytes + 9 + 12) + 2 * draft * 4 * 8 * 4
            assert ledger.waiting_bytes - per_column * frontier.columns <= held
            cache.crop(-rejected)
            accepted += draft - rejected
            if cycle % 3 == 0:
                cache.set_recording(False)
                forward(model, prompt(1, cycle), cache)
                accepted += 1
            ledger = cache.ledger()
            assert ledger.declared_bytes == ledger.measured_bytes
            assert ledger.payload_bytes + ledger.slack_bytes <= 2 * owners * most
            cache.check_integrity()
    assert accepted >= 300
    assert int(cache.stored_rows(0).max()) <= budget


def test_a_budget_within_the_residual_is_never_quantized() -> None:
    model = tiny("llama")
    cache, plain = (kv.H2OCache(model, budget=8, **o) for o in ({"quantize": "int4"}, {}))
    assert torch.equal(generate(model, prompt(40), cache, 80), generate(model, prompt(40), plain, 80))
    assert not any(rows.coded_slots for rows in rows_of(cache))
    assert cache._runtime.snapshot.width < 64


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


@pytest.mark.parametrize("name", ["streaming_llm", "h2o"])
def test_the_transient_peak_has_stores_that_are_made_while_others_live(name: str) -> None:
    """Blocks made anew by a decode step, and accepted drafts: old and new stores, and one layer as it is read."""
    model = tiny("llama", layers=4)
    cache = quantized(name, model)
    most = 0
    with torch.no_grad():
        forward(model, prompt(60), cache)
        start = cache.ledger().transient_peak_bytes
        for step in range(40):
            before = {id(t): t for rows in rows_of(cache) for t in rows.tensors()}
            accept(cache, model, 9, step)
            after = {id(t): t for rows in rows_of(cache) for t in rows.tensors()}
            most = max(most, sum(t.nbytes for t in (before | after).values()))
            assert cache.ledger().transient_peak_bytes >= most
    assert cache.ledger().transient_peak_bytes < 4 * max(start, most), "no peak is made up"
