"""Caches on one model do not influence each other, whichever way their forwards interleave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import (
    BACKENDS,
    TRAINED,
    case_id,
    content,
    forward,
    left_padded,
    make_cache,
    policy_units,
    prompt,
    small_options,
    stored_otherwise,
    tiny,
)
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.contract import Phase

CASES = [("full", {}), *policy_units(), *stored_otherwise()]


def session(model: Any, cache: Any, seed: int, rows: int) -> Iterator[Tensor]:
    """Yield the logits of a padded prompt, some decode steps, a second turn and more decode steps, one at a time."""
    ids, mask = left_padded([prompt(16 - row, seed + row) for row in range(rows)])
    yield _step(model, cache, ids, mask)
    for index, length in enumerate((1, 1, 5, 1, 1, 1)):
        mask = torch.cat([mask, torch.ones((rows, length), dtype=torch.long)], dim=1)
        yield _step(model, cache, prompt(length, seed * 100 + index, rows), mask)


def _step(model: Any, cache: Any, ids: Tensor, mask: Tensor) -> Tensor:
    positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    # Around the forward only: two suspended generators would restore each other's grad mode.
    with torch.no_grad():
        return forward(model, ids, cache, attention_mask=mask, position_ids=positions)[:, -1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_two_caches_step_by_step(case: Any, backend: str) -> None:
    model = tiny("llama", backend)
    first = lambda: session(model, make_cache(case[0], model, **case[1]), seed=1, rows=1)  # noqa: E731
    # A checkpoint that was trained for one policy takes no other.
    other = case if case[0] in TRAINED else ("snapkv", {"budget": 9, "window": 3})
    second = lambda: session(model, make_cache(other[0], model, **other[1]), seed=5, rows=3)  # noqa: E731
    alone = list(first()), list(second())
    together = list(zip(first(), second(), strict=True))
    for step, (a, b) in enumerate(together):
        assert torch.equal(a, alone[0][step])
        assert torch.equal(b, alone[1][step])


def test_many_threads() -> None:
    # A checkpoint that was trained for one policy takes no other.
    models = {name: tiny("llama") for name in ("any", *TRAINED)}
    jobs: list[tuple[Any, int, int]] = [(case, 3 + i, 1 + i % 3) for i, case in enumerate(CASES)]

    def run(case: Any, seed: int, rows: int) -> list[Tensor]:
        model = models[case[0] if case[0] in TRAINED else "any"]
        return list(session(model, make_cache(case[0], model, **case[1]), seed, rows))

    alone = [run(*job) for job in jobs]
    for start in range(0, len(jobs), 4):
        part = range(start, min(start + 4, len(jobs)))
        results = in_threads([lambda i=i: [run(*jobs[i]) for _ in range(3)] for i in part])
        for index, rounds in zip(part, results, strict=True):
            for steps in rounds:
                assert all(torch.equal(a, b) for a, b in zip(steps, alone[index], strict=True)), jobs[index]


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """Run works at the same time and return what each returned or raised."""
    results: list[Any] = [None] * len(works)
    barrier = threading.Barrier(len(works))

    def run(index: int) -> None:
        torch.set_num_threads(1)
        barrier.wait()
        try:
            results[index] = works[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return results


PAUSES = [(layer, phase) for layer in range(2) for phase in (Phase.APPEND, Phase.ATTEND, Phase.SCORE, Phase.PACK)]


@pytest.mark.parametrize("length", [1, 4])
@pytest.mark.parametrize("name", ["full", "snapkv", "streaming_llm", "sliding_window"])
def test_a_second_forward_of_one_cache_refuses_the_first(name: str, length: int) -> None:
    """Paused anywhere, the earlier forward is refused when it goes on, and the later one is as if it had been alone."""
    model = tiny("llama")
    cache = make_cache(name, model, **small_options(name))
    with torch.no_grad():
        forward(model, prompt(12, 1), cache)
        forward(model, prompt(1, 2), cache)
    for layer, phase in PAUSES:
        mine, twin = cache.fork(), cache.fork()
        paused, resume = threading.Event(), threading.Event()

        def first(mine: Any = mine) -> Any:
            with torch.no_grad():
                return forward(model, prompt(length, 3), mine)

        def observe(
            at: int,
            entered: Phase,
            place: Any = (layer, phase),
            paused: threading.Event = paused,
            resume: threading.Event = resume,
            mine: Any = mine,
        ) -> None:
            if (at, entered) == place and not paused.is_set():
                mine._runtime.observer = None
                paused.set()
                resume.wait(timeout=60)

        mine._runtime.observer = observe
        outcome: list[Any] = []

        def run(first: Any = first, outcome: list[Any] = outcome) -> None:
            try:
                outcome.append(first())
            except BaseException as error:
                outcome.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert paused.wait(timeout=60)
        if phase == Phase.APPEND:
            # Rows are written under the cache's lock: the second forward would wait. Letting the first one go on is
            # then the only order there is.
            resume.set()
            thread.join(timeout=60)
            assert isinstance(outcome[0], Tensor)
            continue
        with torch.no_grad():
            got = forward(model, prompt(length, 4), mine)
            expected = forward(model, prompt(length, 4), twin)
        resume.set()
        thread.join(timeout=60)
        assert isinstance(outcome[0], kv.StaleGenerationError), (layer, phase, outcome)
        assert torch.equal(got, expected)
        mine.check_integrity()
        assert content(mine).keys() == content(twin).keys()
        assert mine.get_seq_length() == twin.get_seq_length()


@pytest.mark.parametrize("act", ["crop", "reorder", "reset", "rollback", "fork", "finish_prefill"])
def test_an_operation_from_another_thread_refuses_the_forward(act: str) -> None:
    model = tiny("llama")
    cache = kv.SnapKVCache(model, budget=8, window=3)
    with torch.no_grad():
        forward(model, prompt(12, 1), cache)
        forward(model, prompt(1, 2), cache)
    acts: dict[str, Callable[[], Any]] = {
        "crop": lambda: cache.crop(0),
        "reorder": lambda: cache.reorder_cache(torch.tensor([0])),
        "reset": cache.reset,
        "rollback": cache.rollback,
        "fork": cache.fork,
        "finish_prefill": cache.finish_prefill,
    }

    def interfere(*_: Any) -> None:
        thread = threading.Thread(target=acts[act])
        thread.start()
        thread.join(timeout=60)

    handle = model.model.layers[0].mlp.register_forward_hook(interfere)
    with torch.no_grad(), pytest.raises(kv.StaleGenerationError, match="one cache for one forward"):
        forward(model, prompt(1, 3), cache)
    handle.remove()
    cache.check_integrity()


@pytest.mark.parametrize("name", ["full", "snapkv", "streaming_llm"])
def test_free_running_forwards_of_one_cache(name: str) -> None:
    """Whatever the scheduler does, every forward either counts or is refused."""
    model = tiny("llama")
    cache = make_cache(name, model, **small_options(name))
    with torch.no_grad():
        forward(model, prompt(12, 1), cache)
    before = cache.get_seq_length()

    def hammer() -> int:
        done = 0
        for step in range(25):
            try:
                with torch.no_grad():
                    columns = cache.get_seq_length()
                    forward(model, prompt(1, step), cache, position_ids=torch.tensor([[columns]]))
                done += 1
            except (kv.StaleGenerationError, kv.ConfigError):
                pass
        return done

    counts = in_threads([hammer, hammer, hammer])
    assert all(isinstance(count, int) for count in counts), counts
    assert cache.get_seq_length() == before + sum(counts)
    cache.check_integrity()
    with torch.no_grad():
        assert forward(model, prompt(1, 99), cache).isfinite().all()
