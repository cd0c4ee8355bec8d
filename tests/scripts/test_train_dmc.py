"""Training for DMC: its losses, the graph it trains against the cache that runs it, a tiny run, and what ships."""

from __future__ import annotations

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
import train_dmc
from script_lib.dmc_training import (
    Recipe,
    Relaxed,
    byte_texts,
    compression_loss,
    compression_target,
    evaluate_cache,
    evaluate_plain,
    held_out,
    make_model,
    train,
)

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument

TINY = Recipe(
    hidden=32, intermediate=48, layers=2, tokens=48, batch=2, teacher_steps=10, retrofit_steps=20, offset=1.0,
    compression_weight=20.0,
)  # fmt: skip
SHIPPED = Path(str(files("hf_kvpolicy.configs"))) / "models" / "dmc-toy"
RECORD = Path(__file__).parents[2] / "benchmarks" / "dmc-toy_cpu_2026-11-30.json"


def test_the_loss_is_one_sided() -> None:
    """max(0, appended share - 1 / ratio): 0.7 of the tokens begin a row where half of them may."""
    assert float(compression_loss(torch.tensor(0.3), 2.0)) == pytest.approx(0.2)
    assert float(compression_loss(torch.tensor(0.5), 2.0)) == 0
    assert float(compression_loss(torch.tensor(0.8), 2.0)) == 0


def test_the_ratio_rises_to_what_is_asked_and_stays() -> None:
    found = [compression_target(TINY, step) for step in range(TINY.retrofit_steps)]
    assert found[0] == 1.0
    assert found == sorted(found)
    assert found[14:] == [2.0] * 6


@torch.no_grad()
def test_hard_decisions_in_training_are_what_the_cache_runs() -> None:
    """The parallel graph with masks, and segments of unequal length, are one model."""
    model = make_model(TINY).eval()
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight[::8].mul_(40)  # decisions of either kind
    model.config.kvpolicy = {"kind": "dmc", "channel": 0, "ratio": 2.0, "offset": 0.0}
    recipe = Recipe(**{**{name: getattr(TINY, name) for name in TINY.__slots__}, "offset": 0.0})
    ids = torch.randint(0, 256, (2, 48))
    cache = kv.DMCCache(model)
    found = model(ids, use_cache=True, **{cache_argument(): cache}).logits
    kv.detach(model)
    relaxed = Relaxed(model, recipe)
    relaxed.hard = True
    torch.testing.assert_close(model(ids, use_cache=False).logits, found, atol=2e-4, rtol=1e-3)
    rows = sum(int(cache.stored_rows(layer).sum()) for layer in range(2))
    assert 1 - float(relaxed.take_mean_alpha()) == pytest.approx(rows / (2 * 48 * 2 * 2), abs=1e-6)
    assert rows < 0.9 * 2 * 48 * 2 * 2


def test_twenty_steps_begin_to_merge() -> None:
    data, _ = byte_texts()
    model = make_model(TINY)
    train(model, data, TINY, steps=TINY.teacher_steps, peak=4e-3, seed=1)
    before = evaluate_plain(model, data[:5000], TINY)
    relaxed, said = Relaxed(model, TINY), list[str]()
    train(model, data, TINY, steps=20, peak=2e-2, seed=2, relaxed=relaxed, say=said.append)
    with torch.no_grad():
        model(next(held_out(data, TINY))[:, :-1], use_cache=False)
    assert relaxed.left == 0, "the channel is gone from attention"
    # Untrained, sigmoid(-1) of the tokens join.
    assert float(relaxed.take_mean_alpha()) > 0.35
    model.config._attn_implementation = "sdpa"
    assert evaluate_plain(model, data[:5000], TINY) < before + 1


def test_a_run_leaves_weights_a_config_a_card_and_a_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_dmc, "Recipe", lambda **given: Recipe(**{**_sizes(), **given}))
    texts = tuple(part[:4000] for part in byte_texts())
    monkeypatch.setattr(train_dmc, "byte_texts", lambda: texts)
    place, record = tmp_path / "toy", tmp_path / "record.json"
    asked = ["--out", str(place), "--record", str(record), "--teacher-steps", "3", "--retrofit-steps", "3"]
    assert train_dmc.main(asked) == 0
    results = json.loads(record.read_text())["results"]
    assert results["weights_sha256"] == digest(place)
    assert results["weights_sha256"] in (place / "README.md").read_text()
    model = train_dmc.load_retrofit(place)
    assert model.config.kvpolicy == {"kind": "dmc", "channel": 0, "ratio": 2.0, "offset": 1.0, "window": None}
    nats, ratio = evaluate_cache(model, texts[1], Recipe(**_sizes()))
    assert (nats, ratio) == pytest.approx((results["retrofit_nats"], results["tokens_per_row"]))


def test_what_ships_does_what_its_card_says() -> None:
    """On the text of the running Python, whose help may differ a little from that of the record."""
    results = json.loads(RECORD.read_text())["results"]
    assert results["weights_sha256"] == digest(SHIPPED)
    card = (SHIPPED / "README.md").read_text()
    assert f"`{digest(SHIPPED)}`" in card
    assert f"{results['tokens_per_row']:.3f} (trained for 2.0)" in card
    assert re.search(r"`scripts/train_dmc [^`]+`", card)
    assert abs(results["tokens_per_row"] - 2.0) <= 0.2
    assert results["loss_gap_nats"] <= 0.1
    assert results["training_cpu_s"] <= 15 * 60
    assert results["parameters"] <= 500_000
    assert sum(file.stat().st_size for file in SHIPPED.iterdir()) < 1_000_000
    _, test = byte_texts()
    nats, ratio = evaluate_cache(train_dmc.load_retrofit(SHIPPED), test[:16_400], Recipe())
    assert ratio == pytest.approx(results["tokens_per_row"], rel=0.1)
    assert nats == pytest.approx(results["retrofit_nats"], abs=0.2)


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def _sizes() -> dict[str, Any]:
    return {name: getattr(TINY, name) for name in TINY.__slots__}
