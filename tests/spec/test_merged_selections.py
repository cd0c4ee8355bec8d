"""Kept rows merged over layer pairs: against a plain loop, exact where none is merged, and with the bytes it says."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from helpers import (
    assert_same_content,
    case_id,
    content,
    forward,
    generate,
    kept_positions,
    left_padded,
    merged_units,
    prompt,
    small_options,
    tiny,
)
from reference import minicache as plain
from torch import Tensor

import hf_kvpolicy as kv

LAYERS, PAIRS, T = 5, ((1, 2), (3, 4)), 0.6
OPTIONS: dict[str, dict[str, Any]] = {
    "snapkv": {"budget": 12, "window": 4, "kernel_size": 3},
    "random": {"budget": 12, "window": 4},
    "sliding_window": {"budget": 12},
    "streaming_llm": {"budget": 12, "sinks": 2, "positions": "original", "protect": [5]},
    "h2o": {"budget": 12, "recent_ratio": 0.25},
    "keyformer": {"budget": 12, "recent_ratio": 0.25},
    "scissorhands": {"budget": 12, "recent": 3, "history": 9},
}
LIFE = (24, 1, 1, 1, 7, 1, 1, 1, 1, 1)
EXACT = {"start_layer": 1, "retention": 1.0}
CASES = [(name, {"unit": unit}) for name in OPTIONS for unit in ("token", "pair")]

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


def merged(name: str, model: Any, retention: float = 0.2, **options: Any) -> Any:
    rule = {"start_layer": 1, "interpolation": T, "retention": retention}
    return kv.make_cache(name, model, **{**OPTIONS[name], "merge_layers": rule, "unit": "token", **options})


def exact_row(cache: Any, layer: int, name: str, head: int, slot: int) -> Tensor:
    """Return a window on the one stored row of a cache that merges nothing (batch row 0)."""
    pair = next(pair for pair in cache._runtime.snapshot.pairs if layer in pair.layers)
    store = getattr(pair, name)
    found = [
        at for at, entry in enumerate(zip(*store.entries(), strict=True)) if tuple(map(int, entry)) == (head, slot)
    ]
    return store.rows_2ED[pair.layers.index(layer), found[0]]


class PlainLoop:
    """A cache of the same selection that merges nothing, whose rows the plain reference overwrites once they stay."""

    def __init__(self, cache: Any, retention: float) -> None:
        self.cache, self.retention = cache, retention
        self.limits: dict[Any, float] = {}
        self.done: set[Any] = set()

    def merge(self) -> None:
        for pair in PAIRS:
            table = self.cache._runtime.snapshot.full_map(pair[0])
            for head in range(2):
                mapped = head if table.map_heads > 1 else 0
                slots = table.live_BMW[0, mapped].nonzero()[:, 0].tolist()
                tokens = table.tokens_BMW[0, mapped].tolist()
                for name in ("keys", "values"):
                    rows = {
                        tokens[slot]: [exact_row(self.cache, layer, name, head, slot) for layer in pair]
                        for slot in slots
                    }
                    self._merge_owner((pair, name, head), rows)

    def _merge_owner(self, owner: Any, rows: dict[int, list[Tensor]]) -> None:
        lower, deeper = ([both[which].tolist() for both in rows.values()] for which in range(2))
        limit = self.limits.setdefault(owner, plain.threshold(lower, deeper, self.retention))
        for token, both in rows.items():
            x, y = (row.tolist() for row in both)
            if (owner, token) not in self.done and not plain.is_exception(x, y, limit):
                for row, found in zip(both, plain.restored(x, y, T), strict=True):
                    row.copy_(torch.tensor(found))
            self.done.add((owner, token))


@torch.no_grad()
@pytest.mark.proves("merged", family="llama")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_step_is_that_of_the_plain_loop(case: tuple[str, dict[str, Any]]) -> None:
    """What stays is chosen, then merged: by the threshold of what the first prompt's selection kept."""
    name, options = case
    model, twin = tiny("llama", layers=LAYERS), tiny("llama", layers=LAYERS)
    cache, loop = merged(name, model, **options), PlainLoop(merged(name, twin, 1.0, **options), 0.2)
    for step, width in enumerate(LIFE):
        ids = prompt(width, step)
        expected = forward(twin, ids, loop.cache)
        torch.testing.assert_close(forward(model, ids, cache), expected, atol=2e-5, rtol=1e-4)
        loop.merge()
        assert kept_positions(cache) == kept_positions(loop.cache)
        assert_same_content(cache, loop.cache, atol=2e-5)
        cache.check_integrity()
    assert cache.statistics.rows_dropped > 0


SPELLED_ALIKE: dict[str, tuple[Any, ...]] = {
    "defaults": (
        "minicache",
        {},
        {"start_layer": 2},
        {"start_layer": None, "interpolation": 0.6, "retention": 0.05},
        MappingProxyType({"retention": 0.05}),
    ),
    "whole numbers": ({"retention": 0, "interpolation": 1}, {"retention": 0.0, "interpolation": 1.0}),
}


@pytest.mark.parametrize("name", [*OPTIONS, "minicache"])
@pytest.mark.parametrize("meaning", SPELLED_ALIKE)
def test_one_meaning_has_one_manifest(name: str, meaning: str, tmp_path: Path) -> None:
    model = tiny("llama", layers=LAYERS)

    def made(rule: Any) -> Any:
        if name == "minicache":
            return kv.MiniCache(model, **({} if rule == "minicache" else rule))
        return merged(name, model, unit="pair", merge_layers=rule)

    caches = [made(rule) for rule in SPELLED_ALIKE[meaning]]
    assert len({cache.manifest.sha256 for cache in caches}) == 1
    assert made({"start_layer": 1}).manifest.sha256 != caches[0].manifest.sha256
    with torch.no_grad():
        forward(model, prompt(20), caches[-1])
    caches[-1].save_pretrained(tmp_path / "saved")
    assert kv.load_cache(tmp_path / "saved", model).manifest == caches[0].manifest


@torch.no_grad()
@pytest.mark.parametrize("name", OPTIONS)
def test_every_row_an_exception_is_the_plain_selection(name: str) -> None:
    model, twin = tiny("llama", layers=LAYERS), tiny("llama", layers=LAYERS)
    cache = merged(name, model, 1.0)
    rows = kv.make_cache(name, twin, **OPTIONS[name], unit="token")
    for step, width in enumerate(LIFE):
        ids = prompt(width, step)
        assert torch.equal(forward(model, ids, cache), forward(twin, ids, rows))
        assert kept_positions(cache) == kept_positions(rows)
    a, b = content(cache), content(rows)
    assert all(torch.equal(part, b[key]) if isinstance(part, Tensor) else part == b[key] for key, part in a.items())


@torch.no_grad()
@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_a_budget_for_everything_is_minicache(name: str) -> None:
    model, twin = tiny("llama", layers=LAYERS), tiny("llama", layers=LAYERS)
    cache = merged(name, model, budget=99)
    alone = kv.MiniCache(twin, start_layer=1, retention=0.2)
    for step, width in enumerate(LIFE):
        ids = prompt(width, step)
        torch.testing.assert_close(forward(model, ids, cache), forward(twin, ids, alone), atol=1e-5, rtol=0)
    assert cache.receipt.replaced_rows == alone.receipt.replaced_rows


@torch.no_grad()
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_rows_that_stay_do_not_change(case: tuple[str, dict[str, Any]]) -> None:
    """Others die and are replaced, in decode and by a second prompt; what is restored of them is the same bits."""
    name, options = case
    model = tiny("llama", layers=LAYERS)
    cache = merged(name, model, **options)
    before: dict[Any, Tensor] = {}
    survived = 0
    for step, width in enumerate((24, *[1] * 14, 9, 1, 1)):
        forward(model, prompt(width, step), cache)
        held = content(cache)
        now = {
            (layer, part, head, token): row
            for layer in range(1, LAYERS)
            for head in range(2)
            for part in ("keys", "values")
            for token, row in zip(held[f"tokens {layer} 0 {head}"], held[f"{part} {layer} 0 {head}"], strict=True)
        }
        assert all(torch.equal(now[key], row) for key, row in before.items() if key in now)
        survived += sum(key in now for key in before)
        before = now
    assert survived
    cache.check_integrity()


# -- bytes ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case[0] in ("snapkv", "h2o", "scissorhands")], ids=case_id)
def test_bytes_are_the_formula(case: tuple[str, dict[str, Any]], dtype: torch.dtype) -> None:
    name, options = case
    model = tiny("llama_head_dim", layers=LAYERS).to(dtype)
    cache = merged(name, model, 0.1, **options)
    ids, mask = left_padded([prompt(n, seed=n) for n in (40, 23)])
    generate(model, ids, cache, 8, attention_mask=mask)
    scalar, dim = dtype.itemsize, 12
    rows = cache.stored_rows(0)
    expected = 2 * dim * scalar * int(rows.sum())  # layer 0 stays as it is
    for store in cache.receipt.replaced_rows[1:]:
        for owner, (keys, values) in enumerate(zip(store.exact_keys, store.exact_values, strict=True)):
            expected += plain.pair_bytes(int(rows.flatten()[owner]), len(keys), len(values), dim, scalar)
    ledger = cache.ledger()
    assert ledger.payload_bytes == expected == cache.receipt.payload_bytes
    assert ledger.declared_bytes == ledger.measured_bytes
    assert len(cache._runtime.snapshot.rows) == 1, "dense rows of pairs are gone"


@torch.no_grad()
def test_what_stays_of_a_prompt_has_its_share_of_exceptions() -> None:
    model = tiny("llama", layers=LAYERS)
    cache = merged("snapkv", model, 0.25, unit="pair")
    forward(model, prompt(40), cache)
    exact = [owner for store in cache.receipt.replaced_rows[1:] for owner in (*store.exact_keys, *store.exact_values)]
    assert {len(owner) for owner in exact} == {3}, "a quarter of the twelve rows that stay, not of forty"


# -- life -------------------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.parametrize("unit", ["token", "pair"])
@pytest.mark.parametrize("name", ["snapkv", "h2o"])
def test_a_prompt_in_chunks_is_held_whole(name: str, unit: str, tmp_path: Path) -> None:
    """Rows of a prompt that is held are not merged: saved midway, it ends as the same prompt in one forward."""
    model = tiny("llama", layers=LAYERS)
    ids = prompt(30)
    held, whole = (merged(name, model, unit=unit, chunked_prefill="hold") for _ in range(2))
    for part in ids.split([11, 12, 7], dim=1):
        forward(model, part, held)
        held.check_integrity()
        held.save_pretrained(tmp_path / "cache")
        loaded = kv.load_cache(tmp_path / "cache", model)
        assert loaded.ledger() == held.ledger()
        assert loaded.receipt.replaced_rows == held.receipt.replaced_rows
        assert all(len(owner) == held.get_seq_length() for owner in held.receipt.replaced_rows[1].exact_keys)
        held = loaded
    forward(model, ids, whole)
    for cache in (held, whole):
        cache.finish_prefill()
    assert kept_positions(held) == kept_positions(whole)
    assert held.receipt.replaced_rows == whole.receipt.replaced_rows
    assert_same_content(held, whole)
    assert not held._runtime.snapshot.pairs[0].unmerged


@torch.no_grad()
@pytest.mark.proves("recorded", family="llama")
@pytest.mark.parametrize(
    "case", [case for case in CASES if case[0] in ("snapkv", "sliding_window", "h2o")], ids=case_id
)
def test_rejected_tokens_leave_nothing(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    model = tiny("llama", layers=LAYERS)
    taken, never = (merged(name, model, **options) for _ in range(2))
    for cache in (taken, never):
        cache.activate_past_recording()
    for step, (fed, rejected) in enumerate(((26, 2), (4, 3), (5, 0), (3, 2))):
        ids = prompt(fed, step)
        forward(model, ids, taken), forward(model, ids[:, : fed - rejected], never)
        taken.crop(-rejected), never.crop(0)
        assert kept_positions(taken) == kept_positions(never)
        assert taken.receipt.replaced_rows == never.receipt.replaced_rows
        assert_same_content(taken, never)
        taken.check_integrity()


@torch.no_grad()
def test_a_second_prompt_that_dropped_nothing_is_taken_back() -> None:
    """Its rows lie among the selected ones, and leave the logs of exceptions too."""
    model = tiny("llama", layers=LAYERS)
    taken, never = (merged("snapkv", model, 0.5, budget=40) for _ in range(2))
    for cache in (taken, never):
        forward(model, prompt(12), cache), forward(model, prompt(1, 1), cache)
    forward(model, prompt(9, 2), taken)
    taken.crop(-9)
    taken.check_integrity()
    assert taken.receipt.replaced_rows == never.receipt.replaced_rows
    for step in range(3):
        assert_same_content(taken, never)
        forward(model, prompt(1, 3 + step), taken), forward(model, prompt(1, 3 + step), never)
    with pytest.raises(kv.StaleGenerationError, match="merged for good"):
        taken.crop(-10)


@pytest.mark.proves("beams", "padded", family="llama")
@pytest.mark.parametrize("case", merged_units(), ids=case_id)
def test_beams_of_a_padded_batch_are_those_of_each_row(case: tuple[str, dict[str, Any]]) -> None:
    name, options = case
    model, prompts = tiny("llama"), [prompt(n, seed=n) for n in (30, 14)]
    ids, mask = left_padded(prompts)
    out = generate(model, ids, kv.make_cache(name, model, **options), 8, attention_mask=mask, num_beams=3)
    for row, alone in enumerate(prompts):
        solo = generate(model, alone, kv.make_cache(name, model, **options), 8, num_beams=3)
        assert out[row, ids.shape[1] :].tolist() == solo[0, alone.shape[1] :].tolist()


# -- what it means, and what is refused -------------------------------------------------------------------------------


@torch.no_grad()
def test_records_name_the_selection_and_the_rows() -> None:
    model = tiny("llama", layers=LAYERS)
    cache = merged("snapkv", model, 0.1, unit="pair")
    forward(model, prompt(30), cache)
    manifest = cache.manifest
    assert manifest.selection_contract.policy == "snapkv"
    assert manifest.selection_contract.unit == "pair"
    assert manifest.selection_contract.specification_unit == "per_layer_pair_kv_head"
    assert (manifest.selection_contract.decision_phase, manifest.selection_contract.budget.max_rows) == ("prefill", 12)
    record = manifest.representation_contract
    assert (record.rows, record.semantic_class) == ("replacement_rows", "lossy_replacement")
    assert record.replacement.producer_layer_map == ((0,), (1, 2), (3, 4))
    assert record.replacement.parameters["threshold_of"] == "rows kept of the first prompt"
    assert manifest.recoverability_contract.omitted == "omitted_irrecoverable"
    assert type(manifest).from_dict(manifest.to_dict()) == manifest
    receipt = cache.receipt
    assert receipt.selected_original_positions is None
    assert cache.state.selected_original_positions is None
    assert [store.layers for store in receipt.replaced_rows] == [(0,), (1, 2), (3, 4)]
    for store in receipt.replaced_rows:
        for layer in store.layers:
            for head, positions in enumerate(cache.positions(layer)):
                assert [[t, t] for t in positions.tolist()] == cache.source_spans(layer)[head].tolist()
                assert [tuple(span) for span in cache.source_spans(layer)[head].tolist()] == list(store.spans[head])
    lower, deeper = cache.positions(1), cache.positions(2)
    assert all(map(torch.equal, lower, deeper))
    assert not torch.equal(lower[0], lower[1]), "heads choose for themselves"


@pytest.mark.proves("merged", family="llama", refused=True)
@pytest.mark.parametrize("name", ["adakv", "headkv", "fastgen", "pyramidkv", "pyramidinfer", "zigzagkv"])
def test_rows_of_unequal_number_are_not_merged(name: str) -> None:
    with pytest.raises(kv.ManifestError, match=r"keep different numbers of rows here\. Leave merge_layers out"):
        kv.make_cache(name, tiny("llama").config, **small_options(name), merge_layers={"start_layer": 0})


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("snapkv", {"unit": "head"}, kv.ManifestError, "unit='head' chooses for each layer by itself"),
        ("snapkv", {"unit": "layer"}, kv.ManifestError, "Use unit='pair' or unit='token'"),
        ("snapkv", {"merge_layers": None, "unit": "pair"}, kv.ManifestError, "Give merge_layers='minicache' too"),
        ("snapkv", {"owner": "query_head"}, kv.ManifestError, "owner='query_head'"),
        ("streaming_llm", {"positions": "cache_local"}, kv.ManifestError, r"from copies of each layer's own"),
        ("snapkv", {"budget": "1MiB"}, kv.BudgetError, "Give rows, or a share of the prompt"),
        ("snapkv", {"quantize": "int8"}, kv.ManifestError, "directions, magnitudes and exceptions"),
        ("snapkv", {"merge_layers": "minicash"}, kv.ConfigError, "Did you mean"),
        ("snapkv", {"merge_layers": 2}, kv.ConfigError, "allowed are None, 'minicache', or a mapping"),
        ("snapkv", {"merge_layers": {"retentoin": 0.1}}, kv.ConfigError, "no option 'retentoin'.*Did you mean"),
        ("snapkv", {"merge_layers": {"retention": 1.5}}, kv.ConfigError, "retention is a share"),
        ("snapkv", {"merge_layers": {"start_layer": 4}}, kv.UnsupportedModelError, "from layer 4 on"),
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_refused(
    name: str, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        merged(name, tiny("llama", layers=LAYERS).config, **options)


def test_a_pair_with_different_tokens_is_found() -> None:
    model = tiny("llama", layers=LAYERS)
    cache = merged("snapkv", model, unit="pair")
    with torch.no_grad():
        forward(model, prompt(30), cache)
    maps = cache._runtime.snapshot.maps
    assert torch.equal(maps[1].tokens_BMW, maps[2].tokens_BMW)
    maps[2].tokens_BMW[0, 0, 0] += 1
    with pytest.raises(kv.IntegrityError, match="layers 1 and 2 share rows, but hold different tokens"):
        cache.check_integrity()
