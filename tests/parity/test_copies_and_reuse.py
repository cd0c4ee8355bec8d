"""Copies, reordered batches, further contexts and mixed grad modes, at small budgets."""

from __future__ import annotations

import copy
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from helpers import (
    CACHE,
    FAMILIES,
    PRUNING,
    assert_same_content,
    case_id,
    forward,
    generate,
    kept_positions,
    left_padded,
    make_cache,
    policy_units,
    prompt,
    stored_otherwise,
    tiny,
)
from torch import Tensor
from transformers import TextIteratorStreamer

import hf_kvpolicy as kv

CASES = [*policy_units(), *stored_otherwise(), ("full", {})]
MODES = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": nullcontext}

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


@pytest.fixture(params=CASES, ids=case_id)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    name, options = request.param
    return name, options


def make(case: tuple[str, dict[str, Any]], model: Any, **options: Any) -> Any:
    return make_cache(case[0], model, **{**case[1], **options})


@torch.no_grad()
def feed(model: Any, cache: Any, ids: Tensor, *splits: int) -> Tensor:
    logits, done = [], 0
    for width in splits:
        logits.append(forward(model, ids[:, done : done + width], cache))
        done += width
    return torch.cat(logits, dim=1)


@pytest.mark.parametrize("how", ["fork", "deepcopy"])
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_a_copy_and_its_origin_do_not_see_each_other(case: tuple[str, dict[str, Any]], how: str, family: str) -> None:
    model = tiny(family)
    shared, left, right = prompt(32, rows=2), prompt(20, 1, rows=2), prompt(20, 2, rows=2)
    cache = make(case, model)
    feed(model, cache, shared, 30, 1, 1)
    twin = cache.fork() if how == "fork" else copy.deepcopy(cache)
    assert type(twin) is type(cache)
    assert_same_content(cache, twin, atol=0)
    splits = (1, 1, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1)
    found = {}
    for width, start in zip(splits, [sum(splits[:i]) for i in range(len(splits))], strict=True):  # interleaved
        for key, used, ids in (("left", cache, left), ("right", twin, right)):
            found.setdefault(key, []).append(feed(model, used, ids[:, start : start + width], width))
    for key, used, ids in (("left", cache, left), ("right", twin, right)):
        fresh = make(case, model)
        feed(model, fresh, shared, 30, 1, 1)
        expected = feed(model, fresh, ids, *splits)
        torch.testing.assert_close(torch.cat(found[key], dim=1), expected, atol=2e-5, rtol=1e-4)
        assert_same_content(used, fresh, atol=2e-5)
        used.check_integrity()


@pytest.mark.parametrize("operation", ["reorder", "repeat", "select", "select_mask"])
@pytest.mark.parametrize("family", ["llama_head_dim", "mistral_window"])
def test_batch_operations_equal_separate_rows(case: tuple[str, dict[str, Any]], operation: str, family: str) -> None:
    if "quantize" in case[1]:
        pytest.skip("a prompt shorter than the budget is quantized in other blocks than alone: see test_quantized.py")
    model = tiny(family)
    prompts = [prompt(n, seed=n) for n in (30, 3, 16)]
    ids, mask = left_padded(prompts)
    cache = make(case, model)
    with torch.no_grad():
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        forward(model, ids, cache, attention_mask=mask, position_ids=positions)
    rows = {
        "reorder": [2, 2, 0],
        "repeat": [0, 0, 1, 1, 2, 2],
        "select": [2, 1],
        "select_mask": [0, 2],
    }[operation]
    if operation == "reorder":
        cache.reorder_cache(torch.tensor(rows))
    elif operation == "repeat":
        cache.batch_repeat_interleave(2)
    elif operation == "select":
        cache.batch_select_indices(torch.tensor(rows))
    else:
        cache.batch_select_indices(torch.tensor([True, False, True]))
    cache.check_integrity()
    assert cache.batch_size == len(rows)
    more = prompt(12, seed=77, rows=len(rows))
    mask = mask[rows]
    logits = []
    with torch.no_grad():
        for step in range(12):
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            position = mask.sum(-1, keepdim=True) - 1
            logits.append(forward(model, more[:, step : step + 1], cache, attention_mask=mask, position_ids=position))
    for place, row in enumerate(rows):
        solo = make(case, model)
        feed(model, solo, prompts[row], prompts[row].shape[1])
        expected = feed(model, solo, more[place : place + 1], *[1] * 12)
        torch.testing.assert_close(torch.cat(logits, 1)[place], expected[0], atol=2e-5, rtol=1e-4)
        assert kept_positions(cache, place) == kept_positions(solo)


def test_operations_on_an_empty_cache(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    cache = make(case, model)
    twin = cache.fork()
    cache.reset()
    cache.rollback()
    cache.finish_prefill()
    cache.check_integrity()
    assert cache.get_seq_length() == twin.get_seq_length() == 0
    assert cache.batch_size == -1
    assert torch.equal(generate(model, prompt(20), cache), generate(model, prompt(20), twin))


def test_reset_serves_the_next_context_like_a_fresh_cache(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    used = make(case, model)
    request = used.state.request_generation if case[0] != "full" else 0
    for number, shape in enumerate([(30, 1), (12, 3), (40, 2)]):
        ids = prompt(shape[0], seed=number, rows=shape[1])
        fresh = make(case, model)
        assert torch.equal(generate(model, ids, used, 8), generate(model, ids, fresh, 8))
        assert_same_content(used, fresh)
        used.check_integrity()
        used.reset()
        assert used.get_seq_length() == 0
    assert case[0] == "full" or used.state.request_generation > request


def test_two_caches_interleaved_on_one_model(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    first, second = make(case, model), make(case, model)
    plain = model(prompt(9)).logits.detach()
    a, b = prompt(30, 1), prompt(25, 2, rows=2)
    found_a, found_b = [], []
    for step, (wide_a, wide_b) in enumerate(zip((20, 1, 1, 6, 1, 1), (9, 1, 1, 12, 1, 1), strict=True)):
        at_a, at_b = sum((20, 1, 1, 6, 1, 1)[:step]), sum((9, 1, 1, 12, 1, 1)[:step])
        found_a.append(feed(model, first, a[:, at_a : at_a + wide_a], wide_a))
        with torch.no_grad():
            assert torch.equal(model(prompt(9)).logits, plain)
        found_b.append(feed(model, second, b[:, at_b : at_b + wide_b], wide_b))
    expected = feed(model, make(case, model), a, 20, 1, 1, 6, 1, 1)
    torch.testing.assert_close(torch.cat(found_a, 1), expected, atol=2e-5, rtol=1e-4)
    expected = feed(model, make(case, model), b, 9, 1, 1, 12, 1, 1)
    torch.testing.assert_close(torch.cat(found_b, 1), expected, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("order", ["inference no_grad grad", "grad inference no_grad", "no_grad grad inference"])
@pytest.mark.parametrize("recorded", [False, True], ids=["plain", "recording"])
def test_grad_modes_may_mix(case: tuple[str, dict[str, Any]], order: str, recorded: bool) -> None:
    if recorded and case[0] in PRUNING:
        pytest.skip("a prompt that is pruned while it runs cannot be recorded")
    model = tiny("llama")
    ids = prompt(60, rows=2)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    results = []
    for modes in (order.split(), ["no_grad"] * 3):
        cache = make(case, model)
        logits, done = [], 0
        if recorded:
            cache.activate_past_recording()
        for number, width in enumerate((20, 1, 1, 1, 9, 1, 1, 1, 12, 1, 1)):
            mode: AbstractContextManager[Any] = MODES[modes[number % 3]]()
            with mode:
                here = slice(done, done + width)
                done += width
                out = forward(
                    model, ids[:, here], cache, attention_mask=mask[:, :done], position_ids=positions[:, here]
                )
            logits.append(out.detach().clone())
        cache.set_recording(False)
        cache.check_integrity()
        cache.fork().reorder_cache(torch.tensor([1, 0]))
        results.append(torch.cat(logits, dim=1)[:, 7:])
    torch.testing.assert_close(results[0], results[1], atol=1e-5, rtol=1e-4)


def test_return_dict_carries_the_cache(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    cache = make(case, model)
    states = case[0] not in PRUNING
    out = generate(
        model, prompt(20), cache, return_dict_in_generate=True, output_scores=True, output_hidden_states=states
    )
    assert getattr(out, CACHE) is cache
    assert len(out.scores) == 6
    assert not states or len(out.hidden_states) == 6
    assert torch.equal(out.sequences, generate(model, prompt(20), make(case, model)))


class _Words:
    """The least a streamer asks of a tokenizer."""

    def decode(self, ids: Any, **kwargs: Any) -> str:
        return "".join(f"{int(i)} " for i in torch.as_tensor(ids).flatten())


def test_streaming_from_another_thread(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    expected = generate(model, prompt(20), make(case, model))[0, 20:].tolist()
    streamer = TextIteratorStreamer(_Words(), skip_prompt=True, timeout=20)
    cache = make(case, model)
    worker = threading.Thread(target=generate, args=(model, prompt(20), cache), kwargs={"streamer": streamer})
    worker.start()
    words = "".join(streamer).split()
    worker.join()
    assert [int(word) for word in words] == expected


def test_threads_on_one_model_do_not_mix(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    prompts = [prompt(20 + 3 * i, seed=i) for i in range(3)]
    expected = [generate(model, ids, make(case, model)).tolist() for ids in prompts]
    found: dict[int, Any] = {}

    def work(index: int) -> None:
        found[index] = generate(model, prompts[index], make(case, model)).tolist()

    workers = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [found[i] for i in range(3)] == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_an_attached_model_serves_other_caches_bit_for_bit(family: str) -> None:
    model, twin = kv.attach(tiny(family)), tiny(family)
    ids, mask = left_padded([prompt(n, seed=n) for n in (19, 4)])
    for kwargs in ({}, {"num_beams": 3}, {"prefill_chunk_size": 5}, {"cache_implementation": "static"}):
        outs = [
            runner.generate(
                ids,
                attention_mask=mask,
                do_sample=False,
                max_new_tokens=5,
                return_dict_in_generate=True,
                output_logits=True,
                **kwargs,
            )
            for runner in (model, twin)
        ]
        assert torch.equal(outs[0].sequences, outs[1].sequences)
        assert all(torch.equal(a, b) for a, b in zip(outs[0].logits, outs[1].logits, strict=True))
    kv.detach(model)
    with torch.no_grad():
        assert torch.equal(model(ids, attention_mask=mask).logits, twin(ids, attention_mask=mask).logits)
