"""MiniCache on whole models: against a plain decode loop, exact where nothing is lost, and with the bytes it says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import content, dynamic_cache, forward, generate, greedy_loop, left_padded, prompt, tiny
from reference import minicache as plain
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.engine import Composition, published
from hf_kvpolicy.evidence import Recency
from hf_kvpolicy.representation import DepthPairs, slerp

FAMILIES = ("llama", "llama_head_dim", "mistral", "mistral_window")


def merged_in_place(full: Any, pair: tuple[int, int], columns: range, limits: dict[Any, float], t: float) -> None:
    """Overwrite columns of two layers of a full cache (one batch row) by what the plain reference restores."""
    lower, deeper = (full.layers[layer] for layer in pair)
    for name in ("keys", "values"):
        low, deep = getattr(lower, name), getattr(deeper, name)
        for head in range(low.shape[1]):
            for column in columns:
                x, y = low[0, head, column].tolist(), deep[0, head, column].tolist()
                if not plain.is_exception(x, y, limits[pair, name, head]):
                    found = plain.restored(x, y, t)
                    low[0, head, column], deep[0, head, column] = (torch.tensor(each) for each in found)


def limits_of(full: Any, pairs: Any, retention: float) -> dict[Any, float]:
    found = {}
    for pair in pairs:
        for name in ("keys", "values"):
            lower, deeper = (getattr(full.layers[layer], name)[0] for layer in pair)
            for head in range(lower.shape[0]):
                found[pair, name, head] = plain.threshold(lower[head].tolist(), deeper[head].tolist(), retention)
    return found


@torch.no_grad()
@pytest.mark.proves("merged", policy="minicache")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("retention", [0.0, 0.1, 0.6])
def test_every_step_is_that_of_the_plain_loop(family: str, retention: float) -> None:
    """A full cache, whose rows are those of transformers' own, rewritten by the reference after every forward."""
    model, twin, ids, t = tiny(family, layers=5), tiny(family, layers=5), prompt(40), 0.6
    pairs = ((1, 2), (3, 4))
    cache = kv.MiniCache(model, start_layer=1, interpolation=t, retention=retention)
    full = kv.FullCache(twin)
    limits: dict[Any, float] = {}
    done = 0
    for width in (24, 1, 1, 1, 6, 1, 1):
        step = ids[:, done : done + width]
        found, expected = forward(model, step, cache), forward(twin, step, full)
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
        limits = limits or limits_of(full, pairs, retention)
        for pair in pairs:
            merged_in_place(full, pair, range(done, done + width), limits, t)
        done += width
        cache.check_integrity()
        for layer in range(5):
            for mine, theirs in zip(cache.stored_view(layer), full.stored_view(layer), strict=True):
                torch.testing.assert_close(mine, theirs, atol=2e-5, rtol=1e-4)


def same_rows_above(model: Any, *lowers: int) -> Any:
    """Let each lower layer pass its input on, and the layer above it compute the same keys and values."""
    with torch.no_grad():
        for lower in lowers:
            below, above = model.model.layers[lower], model.model.layers[lower + 1]
            below.self_attn.o_proj.weight.zero_()
            below.mlp.down_proj.weight.zero_()
            above.input_layernorm.weight.copy_(below.input_layernorm.weight)
            for name in ("k_proj", "v_proj"):
                getattr(above.self_attn, name).weight.copy_(getattr(below.self_attn, name).weight)
    return model


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_equal_layers_equal_the_dense_cache(family: str) -> None:
    model, twin = (same_rows_above(tiny(family, layers=4), 0, 2) for _ in range(2))
    ids, mask = left_padded([prompt(n, seed=n) for n in (30, 9)])
    cache, full = kv.MiniCache(model, start_layer=0), kv.FullCache(twin)
    for runner, used in ((model, cache), (twin, full)):
        greedy_loop(runner, ids, used, 1, mask)
    for key, value in content(full).items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(content(cache)[key], value, atol=0, rtol=1e-6)
    assert all(not any(owner for owner in store.exact_keys) for store in cache.receipt.replaced_rows)
    cache.reset()
    found = greedy_loop(model, ids, cache, 12, mask)
    expected = greedy_loop(twin, ids, dynamic_cache(twin), 12, mask)
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=0)


@torch.no_grad()
def test_equal_layers_in_two_bytes_are_stored_without_loss() -> None:
    model, twin = (same_rows_above(tiny("llama", layers=4), 0, 2).to(torch.bfloat16) for _ in range(2))
    cache, full = kv.MiniCache(model, start_layer=0), kv.FullCache(twin)
    for step in (prompt(30), prompt(1, 1), prompt(1, 2), prompt(5, 3)):
        assert torch.equal(forward(model, step, cache), forward(twin, step, full))
    for layer in range(4):
        for mine, theirs in zip(cache.stored_view(layer), full.stored_view(layer), strict=True):
            assert torch.equal(mine, theirs)


@torch.no_grad()
def test_every_row_an_exception_is_exact() -> None:
    model, twin = tiny("llama", layers=4), tiny("llama", layers=4)
    cache, full = kv.MiniCache(model, start_layer=0, retention=1.0), kv.FullCache(twin)
    for step in (prompt(30), prompt(1, 1), prompt(1, 2), prompt(5, 3)):
        assert torch.equal(forward(model, step, cache), forward(twin, step, full))
    assert cache.receipt.rows_per_owner == ((37, 37),) * 2


@torch.no_grad()
def test_the_error_is_that_of_the_direction() -> None:
    """A prompt is attended densely, so that both caches are given the same rows."""
    model, twin, ids = tiny("llama", layers=4), tiny("llama", layers=4), prompt(50)
    cache, full = kv.MiniCache(model, start_layer=0, interpolation=0.6, retention=0.0), kv.FullCache(twin)
    forward(model, ids, cache), forward(twin, ids, full)
    for pair in ((0, 1), (2, 3)):
        for part in range(2):
            lower, deeper = (full.stored_view(layer)[part][0] for layer in pair)
            for layer, share in zip(pair, (0.6, 0.4), strict=True):
                found, original = cache.stored_view(layer)[part][0], full.stored_view(layer)[part][0]
                for head in range(lower.shape[0]):
                    for column in range(50):
                        x = original[head, column]
                        d = plain.distance(lower[head, column].tolist(), deeper[head, column].tolist())
                        error = 2 * float(x.norm()) * float(torch.tensor(share * d * torch.pi / 2).sin())
                        assert float((found[head, column] - x).norm()) == pytest.approx(error, abs=2e-5)


@torch.no_grad()
def test_nothing_drifts_over_a_thousand_steps() -> None:
    model = tiny("llama")
    cache = kv.MiniCache(model, start_layer=0)
    forward(model, prompt(40), cache)
    for step in range(10):
        forward(model, prompt(1, step), cache)
    before = [[rows[:, :, :50].clone() for rows in cache.stored_view(layer)] for layer in range(2)]
    thresholds = [part.clone() for part in cache._runtime.snapshot.pairs[0].thresholds]
    for step in range(1000):
        forward(model, prompt(1, step), cache)
    for layer in range(2):
        for rows, old in zip(cache.stored_view(layer), before[layer], strict=True):
            assert torch.equal(rows[:, :, :50], old)
    assert all(map(torch.equal, cache._runtime.snapshot.pairs[0].thresholds, thresholds))
    cache.check_integrity()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_are_the_formula_and_dense_rows_are_gone(dtype: torch.dtype) -> None:
    model = tiny("llama_head_dim", layers=5).to(dtype)
    cache = kv.MiniCache(model, start_layer=1, retention=0.05)
    ids, mask = left_padded([prompt(n, seed=n) for n in (300, 120)])
    greedy_loop(model, ids, cache, 8, mask)
    scalar, dim, tokens = dtype.itemsize, 12, (307, 127)
    expected = 2 * dim * scalar * sum(tokens) * 2  # layer 0 stays as it is
    for store in cache.receipt.replaced_rows[1:]:
        for owner, (keys, values) in enumerate(zip(store.exact_keys, store.exact_values, strict=True)):
            expected += plain.pair_bytes(tokens[owner // 2], len(keys), len(values), dim, scalar)
    ledger = cache.ledger()
    assert ledger.payload_bytes == expected == cache.receipt.payload_bytes
    assert ledger.declared_bytes == ledger.measured_bytes
    # Two pairs and a layer of 12 numbers a row: 8 magnitudes a row and pair weigh as much as they save in two bytes.
    snapshot = cache._runtime.snapshot
    assert len(snapshot.rows) == 1
    assert not snapshot.pending
    assert ledger.kept_ratio.value < (0.85 if dtype is torch.float32 else 1.0)


@torch.no_grad()
def test_the_prompts_dense_rows_live_one_pair_at_a_time() -> None:
    """The peak is what is published, one pair's two dense layers and the workspace of one merge."""
    model = tiny("llama", layers=8)
    cache = kv.MiniCache(model, start_layer=0, retention=0.0)
    forward(model, prompt(256), cache)
    layer_bytes, ledger = 2 * 256 * 2 * 8 * 4, cache.ledger()
    workspace = slerp.merge_workspace_bytes(torch.empty(1, 2, 256, 8))
    assert 0 < ledger.transient_peak_bytes - ledger.measured_bytes <= 2 * layer_bytes + workspace


@torch.no_grad()
@pytest.mark.parametrize("block_elements", [1, 16 * 7, 16 * 30])
def test_merging_in_blocks_changes_nothing(block_elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, receipts, views = tiny("llama"), [], []
    for elements in (1 << 18, block_elements):
        monkeypatch.setattr(slerp, "_BLOCK_ELEMENTS", elements)
        cache = kv.MiniCache(model, start_layer=0, retention=0.1)
        forward(model, prompt(100), cache), forward(model, prompt(20, 1), cache)
        receipts.append(cache.receipt.replaced_rows)
        views.append(cache.stored_view(1))
    assert receipts[0] == receipts[1]
    for one, other in zip(*views, strict=True):
        # Vectorized sines and their remainders differ by an ulp.
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


def test_the_workspace_does_not_grow_with_the_prompt() -> None:
    def beyond_distances(tokens: int) -> int:
        return slerp.merge_workspace_bytes(torch.empty(1, 8, tokens, 128, device="meta")) - 8 * tokens * 4

    assert beyond_distances(4096) == beyond_distances(131072) == 8 * 4 * (1 << 18)


def test_an_odd_last_layer_and_those_below_the_start_stay_dense() -> None:
    def pairs(layers: int, **options: Any) -> Any:
        return kv.MiniCache(tiny("llama", layers=layers).config, **options).composition.representation.pairs

    assert pairs(8) == ((4, 5), (6, 7))
    assert pairs(5) == ((2, 3),)
    assert pairs(5, start_layer=0) == ((0, 1), (2, 3))
    assert pairs(4, start_layer=1) == ((1, 2),)


@pytest.mark.parametrize(
    ("layers", "options", "error", "message"),
    [
        (1, {}, kv.UnsupportedModelError, "no two neighbours"),
        (2, {}, kv.UnsupportedModelError, "from layer 1 on"),
        (4, {"start_layer": 3}, kv.UnsupportedModelError, "from layer 3 on"),
        (4, {"start_layer": 4}, kv.ConfigError, "layers are 0 to 3"),
        (4, {"start_layer": -1}, kv.ConfigError, "is no layer"),
        (4, {"start_layer": 1.5}, kv.ConfigError, "whole number"),
        (4, {"interpolation": 1.1}, kv.ConfigError, "interpolation is a share"),
        (4, {"retention": -0.1}, kv.ConfigError, "retention is a share"),
        (4, {"budget": 64}, kv.ConfigError, "no option 'budget'"),
    ],
)
def test_what_cannot_be_merged_is_refused(layers: int, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        kv.make_cache("minicache", tiny("llama", layers=layers).config, **options)


@pytest.mark.parametrize("axes", [{"schedule": "end_of_prefill"}, {"storage": "ragged"}], ids=str)
def test_layers_that_keep_different_tokens_are_not_merged(axes: dict[str, Any]) -> None:
    rule = DepthPairs(name="merged", replaces_rows=True, pairs=((0, 1),), interpolation=0.6, retention=0.05)
    made: dict[str, Any] = {"policy": "both", "schedule": "never", "evidence": Recency(), "representation": rule}
    Composition(**made)
    with pytest.raises(kv.ManifestError, match=r"keep the same tokens|different positions"):
        Composition(**{**made, **axes})


@torch.no_grad()
def test_an_answer_can_be_taken_back_and_a_prompt_cannot() -> None:
    model, ids = tiny("llama", layers=4), prompt(60)
    taken, never = (kv.MiniCache(model, start_layer=0, retention=0.2) for _ in range(2))
    for cache, length in ((taken, 55), (never, 44)):
        forward(model, ids[:, :40], cache)
        for column in range(40, length):
            forward(model, ids[:, column : column + 1], cache)
    taken.crop(-11)
    assert taken.receipt.replaced_rows == never.receipt.replaced_rows
    for column in range(44, 60):
        step = ids[:, column : column + 1]
        assert torch.equal(forward(model, step, taken), forward(model, step, never))
    with pytest.raises(kv.StaleGenerationError, match="merged for good at column 40"):
        taken.crop(-21)


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_beams_of_a_padded_batch_are_those_of_each_row(family: str) -> None:
    model = tiny(family, layers=4)
    prompts = [prompt(n, seed=n) for n in (30, 8)]
    ids, mask = left_padded(prompts)
    options: dict[str, Any] = {"start_layer": 0, "retention": 0.2}
    out = generate(model, ids, kv.MiniCache(model, **options), 8, attention_mask=mask, num_beams=3)
    for row, tokens in enumerate(prompts):
        alone = generate(model, tokens, kv.MiniCache(model, **options), 8, num_beams=3)
        assert out[row, ids.shape[1] :].tolist() == alone[0, tokens.shape[1] :].tolist()


@torch.no_grad()
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda store: store.index_E[:2].fill_(int(store.index_E[0])), "twice or out of order"),
        (lambda store: store.index_E[: store.exceptions].add_(10**6), "outside the 30 slots"),
        (lambda store: store.index_E[:1].zero_(), "where there is no row"),
        (lambda store: store.thresholds_BH.fill_(float("nan")), "thresholds for other batch rows"),
    ],
)
def test_a_store_that_contradicts_itself_is_found(damage: Any, message: str) -> None:
    model = tiny("llama")
    ids, mask = left_padded([prompt(30), prompt(20, 1)])
    cache = kv.MiniCache(model, start_layer=0, retention=0.2)
    greedy_loop(model, ids.flip(0), cache, 1, mask.flip(0))
    cache.check_integrity()
    damage(cache._runtime.snapshot.pairs[0].values)
    with pytest.raises(kv.IntegrityError, match=message):
        cache.check_integrity()


@torch.no_grad()
def test_a_pair_is_offloaded_with_its_deeper_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meta device stands in for a CPU beside a GPU; what lies there has no numbers and is not brought back here."""
    monkeypatch.setattr(published, "OFFLOAD_DEVICE", torch.device("meta"))
    model = tiny("llama", layers=5)
    cache = kv.MiniCache(model, start_layer=1)
    forward(model, prompt(20), cache)

    def away() -> list[bool]:
        return [store.device.type == "meta" for store in cache._runtime.snapshot.buffers]

    for layer, expected in ((1, [0, 0, 0]), (2, [0, 1, 0]), (0, [1, 1, 0]), (3, [1, 1, 0]), (4, [1, 1, 1])):
        cache.offload(layer)
        assert away() == [bool(each) for each in expected], layer
    assert cache._runtime.snapshot.maps[0].device.type == "meta", "what layers share leaves with the last"


@torch.no_grad()
def test_records_say_what_rows_stand_for() -> None:
    model = tiny("llama", layers=5)
    cache = kv.MiniCache(model, start_layer=1, retention=0.1)
    assert cache.receipt.rows_per_owner == ((), (), ())
    forward(model, prompt(30), cache)
    record = cache.manifest.representation_contract
    assert (record.rows, record.semantic_class) == ("replacement_rows", "lossy_replacement")
    assert record.replacement.producer_layer_map == ((0,), (1, 2), (3, 4))
    assert record.replacement.consumer_layer_map == (0, 1, 1, 3, 3)
    assert cache.manifest.selection_contract.unit == "pair"
    assert cache.state.selected_original_positions is None
    assert cache.state.replacement_object_ids == ("layer 0", "layer 1+2", "layer 3+4")
    receipt = cache.receipt
    assert receipt.selected_original_positions is None
    assert receipt.consumer_schema == record.consumer_schema == "slerp_depth_pairs"
    assert [store.layers for store in receipt.replaced_rows] == [(0,), (1, 2), (3, 4)]
    assert all(len(owner) == 3 for store in receipt.replaced_rows[1:] for owner in store.exact_keys)
    for layer in range(5):
        for head, positions in enumerate(cache.positions(layer)):
            assert positions.tolist() == list(range(30))
            assert cache.source_spans(layer)[head].tolist() == [[token, token] for token in range(30)]
        assert cache.stored_rows(layer).tolist() == [[30, 30]]
    with pytest.raises(kv.ManifestError, match="lossy_replacement"):
        cache.prefix_digest(range(30))


def test_plain_rows_import_nothing_of_it(tmp_path: Path) -> None:
    """A process that runs other policies never loads the step, the store or the codec of merged or quantized rows."""
    code = """
import json, sys
import torch, hf_kvpolicy as kv
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=31, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
                                     num_attention_heads=2, num_key_value_heads=1)).eval()
for cache in (kv.FullCache(model), kv.SnapKVCache(model, budget=8, window=3), kv.StreamingLLMCache(model, budget=8)):
    model.generate(torch.arange(1, 20)[None], cache=cache, max_new_tokens=3, do_sample=False)
    cache.check_integrity(), cache.receipt.digest, cache.fork(), cache.ledger(), cache.crop(0)
    cache.save_pretrained(sys.argv[1]), kv.load_cache(sys.argv[1], model)
print(json.dumps(sorted(name for name in sys.modules if name.startswith("hf_kvpolicy"))))
"""
    place = str(tmp_path / "cache")
    done = subprocess.run([sys.executable, "-c", code, place], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    loaded = json.loads(done.stdout.splitlines()[-1])
    assert "hf_kvpolicy.persistence.codec" in loaded
    new = {"engine.merged", "storage.merged", "persistence.pairs", "replacements"}
    new |= {"engine.merged_tokens", "engine.token_frame", "storage.trailing", "replaced_segments"}
    new |= {"engine.coded", "engine.coded_again", "storage.coded", "storage.codes", "persistence.coded"}
    new |= {"representation.quantized", "engine.ragged.coded", "storage.ragged_coded", "storage.owner_blocks"}
    new |= {"engine.condensed", "replaced_pairs", "replaced_layers", "repeating"}
    assert not {f"hf_kvpolicy.{name}" for name in new} & set(loaded)
    for name in new:
        assert (Path(kv.__file__).parent / f"{name.replace('.', '/')}.py").exists(), name


def test_generate_runs() -> None:
    model = tiny("llama", layers=4)
    out = generate(model, prompt(20), kv.MiniCache(model), 5)
    assert out.shape == (1, 25)
