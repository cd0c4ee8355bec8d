"""The toy with condensed layers: training computes what the cache does, learns, and leaves a checkpoint that works."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("evaluate")

from script_lib.condensed_training import iterated_logits, next_token_loss
from train_layer_condensed import Plan, make_model, run, table, text_bytes, train, written

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument

PLAN = Plan(layers=4, hidden=16, heads=2, steps=15, batch=4, tokens=24, judged=3, rate=1e-2)


@torch.no_grad()
@pytest.mark.parametrize("warmup_layers", [0, 2])
@pytest.mark.parametrize(("forward_passes", "backward_passes"), [(0, 1), (2, 2), (7, 2)])
def test_training_computes_what_the_cache_does(warmup_layers: int, forward_passes: int, backward_passes: int) -> None:
    passes = {"forward_passes": forward_passes, "backward_passes": backward_passes}
    model = make_model(replace(PLAN, warmup_layers=warmup_layers, **passes), condensed=True).eval()
    ids = text_bytes()[:40].view(2, 20)
    cache = kv.LayerCondensedCache(model, encoding="iterated")
    found = model(ids, **{cache_argument(): cache}, use_cache=True).logits
    torch.testing.assert_close(iterated_logits(model, ids), found, atol=1e-5, rtol=1e-4)


def test_gradients_flow_through_the_last_runs_only() -> None:
    """With one of them the rows that lower layers read are constants; and nobody's unused projections learn."""
    ids = text_bytes()[:40].view(2, 20)
    grads = {}
    for backward in (1, 2):
        model = make_model(replace(PLAN, warmup_layers=0, backward_passes=backward), condensed=True)
        next_token_loss(iterated_logits(model, ids), ids).backward()
        assert all(layer.self_attn.k_proj.weight.grad is None for layer in model.model.layers[:3])
        grads[backward] = model.model.layers[3].self_attn.k_proj.weight.grad
    assert not torch.allclose(grads[1], grads[2])


def test_a_few_steps_learn_and_the_checkpoint_generates(tmp_path: Path) -> None:
    text = text_bytes()
    model = make_model(PLAN, condensed=True)
    losses = train(model, text, PLAN, lambda line: None)
    assert sum(losses[-3:]) / 3 < losses[0] - 0.5
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    answers = {
        written(each, kv.LayerCondensedCache(each, encoding=encoding), "The value", 12)
        for each in (model, loaded)
        for encoding in ("sequential", "auto")
    }
    assert len(answers) == 1, "nine bytes are as many as the passes"
    cache = kv.LayerCondensedCache(loaded)
    written(loaded, cache, "The value of the expression ", 8)
    cache.check_integrity()
    assert cache.ledger().kept_ratio.value == 0.5
    with pytest.raises(kv.CheckpointAdmissionError, match="trained for layer_condensed"):
        kv.SnapKVCache(loaded, budget=64)


def test_both_models_are_judged_on_text_they_have_not_seen() -> None:
    found = run(PLAN, lambda line: None)
    assert found["stored_ratio"] == 0.5
    assert found["condensed"]["map"] == [0, 3, 3, 3]
    assert set(found["condensed"]["unseen_loss"]) == {"sequential", "iterated"}
    for name in ("ordinary", "condensed"):
        assert found[name]["train_loss"] < found[name]["first_loss"]
        assert found[name]["full_payload_bytes"] == found["ordinary"]["payload_bytes"]
    shown = table(found)
    assert "condensed  iterated" in shown
    assert "0.500 of the ordinary one's bytes" in shown
