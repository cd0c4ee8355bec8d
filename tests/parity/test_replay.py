"""A prompt captured once and published into a cache is the prompt that the cache would have run itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import (
    BACKENDS,
    FAMILIES,
    PRUNING,
    TRAINED,
    assert_same_content,
    case_id,
    forward,
    left_padded,
    make_cache,
    policy_units,
    prompt,
    small_options,
    stored_otherwise,
    tiny,
)

import hf_kvpolicy as kv
from hf_kvpolicy.replay import CapturedPrompt, can_replay, capture_prompt, replay_prompt

UNREPLAYED = (*PRUNING, *TRAINED)
CASES = [("full", {}), *(case for case in [*policy_units(), *stored_otherwise()] if case[0] not in UNREPLAYED)]


def made(name: str, model: Any, options: dict[str, Any]) -> Any:
    return make_cache(name, model, **options)


def run_and_replay(
    case: tuple[str, dict[str, Any]], model: Any, captured: CapturedPrompt, ids: torch.Tensor, **arguments: Any
) -> tuple[Any, Any]:
    """Return the cache that ran the prompt and the one it was published into, after some decode steps each."""
    ran, replayed = made(case[0], model, case[1]), made(case[0], model, case[1])
    with torch.inference_mode():
        logits = forward(model, ids, ran, **arguments)[:, -1]
        replay_prompt(replayed, model, captured)
        torch.testing.assert_close(captured.next_logits_BV, logits, atol=1e-5, rtol=1e-4)
        assert_same_content(ran, replayed)
        mask = arguments.get("attention_mask")
        for step in range(4):
            token = prompt(1, seed=step, rows=ids.shape[0])
            if mask is not None:
                mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
                positions = (mask.cumsum(-1) - 1)[:, -1:]
                arguments = {"attention_mask": mask, "position_ids": positions}
            expected, found = forward(model, token, ran, **arguments), forward(model, token, replayed, **arguments)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    return ran, replayed


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_replay_leaves_what_the_run_leaves(case: tuple[str, dict[str, Any]], family: str) -> None:
    model, ids = tiny(family), prompt(30)
    ran, replayed = run_and_replay(case, model, capture_prompt(model, ids), ids)
    assert_same_content(ran, replayed)
    for name in ("forwards", "publications", "selections", "rows_dropped"):
        assert getattr(ran.statistics, name) == getattr(replayed.statistics, name), name
    assert replayed.manifest == ran.manifest
    replayed.check_integrity()


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_padded_rows_replay(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    ids, mask = left_padded([prompt(30), prompt(21, seed=1)])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    captured = capture_prompt(model, ids, mask, positions)
    run_and_replay(case, model, captured, ids, attention_mask=mask, position_ids=positions)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_model_is_left_as_it_was(backend: str) -> None:
    model, ids = tiny("llama", backend), prompt(20)
    for attached in (False, True):
        if attached:
            kv.attach(model)
        before, hooks = model.config._attn_implementation, dict(model.model._forward_pre_hooks)
        expected = model(ids, logits_to_keep=1).logits[:, -1]
        torch.testing.assert_close(capture_prompt(model, ids).next_logits_BV, expected, atol=0, rtol=0)
        assert model.config._attn_implementation == before
        assert dict(model.model._forward_pre_hooks) == hooks
        torch.testing.assert_close(model(ids, logits_to_keep=1).logits[:, -1], expected, atol=0, rtol=0)


def test_evidence_is_taken_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), prompt(30)
    captured = capture_prompt(model, ids)
    for name in ("h2o", "snapkv", "adakv"):
        evidence = type(made(name, model, small_options(name)).composition.evidence)
        counted = {"h2o": "observe_", "snapkv": "votes", "adakv": "votes"}[name]
        calls, original = [], getattr(evidence, counted)

        def count(self: Any, *args: Any, _original: Any = original, _calls: list[int] = calls, **kw: Any) -> Any:
            _calls.append(1)
            return _original(self, *args, **kw)

        monkeypatch.setattr(evidence, counted, count)
        with torch.inference_mode():
            for budget in (8, 10, 12):
                replay_prompt(made(name, model, small_options(name) | {"budget": budget}), model, captured)
                if budget == 8:
                    first = len(calls)
        assert len(calls) == first > 0, name
        monkeypatch.undo()


def test_budgets_are_those_of_their_own_runs() -> None:
    """Scores shared by a larger budget's replay serve a smaller one."""
    model, ids = tiny("llama"), prompt(30)
    captured = capture_prompt(model, ids)
    for budget in (14, 8, 11):
        for name in ("h2o", "keyformer", "snapkv", "adakv", "pyramidkv"):
            run_and_replay((name, small_options(name) | {"budget": budget}), model, captured, ids)


def test_what_cannot_be_replayed_is_refused() -> None:
    model, ids = tiny("llama"), prompt(20)
    captured = capture_prompt(model, ids)
    pruning, used = made("pyramidinfer", model, small_options("pyramidinfer")), kv.FullCache(model)
    with torch.inference_mode():
        forward(model, ids, used)
    recording = kv.FullCache(model)
    recording.activate_past_recording()
    trained = [made(name, tiny("llama"), {}) for name in TRAINED]
    for cache in (pruning, used, recording, *trained):
        assert not can_replay(cache)
        with pytest.raises(kv.ConfigError, match="Run the prompt through the model instead"):
            replay_prompt(cache, model, captured)
    assert not can_replay(object())


def test_a_replay_that_fails_leaves_the_cache_empty_and_the_next_forward_free() -> None:
    model, ids = tiny("llama"), prompt(20)
    captured, cache = capture_prompt(model, ids), kv.SnapKVCache(model, budget=8, window=3)

    def fail(layer: int, phase: Any) -> None:
        if layer == 1:
            raise RuntimeError("injected")

    cache._runtime.observer = fail
    with torch.inference_mode(), pytest.raises(RuntimeError, match="injected"):
        replay_prompt(cache, model, captured)
    cache._runtime.observer = None
    cache.rollback()
    assert cache.get_seq_length() == 0
    with torch.inference_mode():
        replay_prompt(cache, model, captured)
    assert cache.get_seq_length() == 20
