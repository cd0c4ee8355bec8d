"""A failure before publication leaves the published state and the next token as they were; a later one does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import has_budget, make_cache, policies, small_options, tiny
from scenarios import CASES, SCENARIOS, Scenario, facts, feed, pair_id, pairs, prepared, probe, watched

from hf_kvpolicy.contract import Phase

SCORED = [
    name
    for name in policies()
    if has_budget(name)
    and name != "random"
    and not make_cache(name, tiny("llama").config, **small_options(name)).composition.is_positional
]
# Forwards of so many tokens whose queries decide what goes.
DECIDING = [*((name, 4) for name in SCORED), *((name, 1) for name in ("h2o", "keyformer", "scissorhands", "fastgen"))]

KINDS: list[Callable[[], BaseException]] = [
    lambda: torch.OutOfMemoryError("CUDA out of memory."),
    KeyboardInterrupt,
    lambda: ValueError("injected"),
]


class Injector:
    """Raises at the n-th phase announced."""

    def __init__(self, at: int, error: BaseException) -> None:
        self.at, self.error, self.count = at, error, 0

    def __call__(self, layer: int, phase: Phase) -> None:
        self.count += 1
        if self.count == self.at + 1:
            raise self.error


@pytest.mark.proves("failures", family="llama")
@pytest.mark.parametrize(("case", "scenario"), list(pairs()), ids=pair_id)
def test_every_phase_of_every_layer(case: Any, scenario: Scenario) -> None:
    model, cache = prepared(case, scenario)
    clean = cache.fork()
    output, events = watched(clean, lambda: scenario.act(model, clean))
    after, next_token = facts(clean), probe(model, clean)
    # A recorded forward ends without one: its tokens wait.
    ends_published = bool(events) and events[-1][1] == Phase.EXPORT
    publications = [i for i, (_, phase) in enumerate(events) if phase == Phase.RELEASE]
    for index in range(len(events)):
        fork = cache.fork()
        runtime, error = fork._runtime, KINDS[index % len(KINDS)]()
        before, snapshot, waiting = facts(fork), fork._runtime.snapshot, fork._runtime.waiting
        runtime.observer = Injector(index, error)
        with pytest.raises(type(error)):
            scenario.act(model, fork)
        runtime.observer = None
        published = sum(i <= index for i in publications)
        if not published:
            assert runtime.snapshot is snapshot, events[index]
            assert runtime.waiting is waiting, events[index]
            assert facts(fork) == before, events[index]
        fork.check_integrity()
        highest = runtime.clock.highest
        if not ends_published or published < len(publications):
            again = scenario.act(model, fork)
            assert output is None or torch.equal(output, again), events[index]
            if ends_published:
                assert runtime.snapshot.generations.cache > highest.cache, "a cancelled number was used again"
        done = facts(fork)
        assert {k: done[k] for k in ("columns", "frontier", "positions", "publications", "dropped")} == {
            k: after[k] for k in ("columns", "frontier", "positions", "publications", "dropped")
        }, events[index]
        assert torch.equal(probe(model, fork), next_token), events[index]
        fork.check_integrity()


PAIRS = list(pairs())
MODULES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "post_attention_layernorm", "mlp"]
FORWARDS = [
    s for s in SCENARIOS if s.name in ("prefill", "decode", "second_turn", "recorded_forward", "accept_by_forward")
]


def _places(model: Any) -> list[tuple[Any, bool]]:
    """Return modules in execution order, and whether the forward is published by the time each runs."""
    last = len(model.model.layers) - 1
    found = []
    for index, layer in enumerate(model.model.layers):
        for name in MODULES:
            found.append((layer.get_submodule(name), index == last and not name.endswith(("q_proj", "k_proj"))))
    return [*found, (model.model.norm, True), (model.lm_head, True)]


@pytest.mark.parametrize("scenario", FORWARDS, ids=pair_id)
@pytest.mark.parametrize("case", CASES, ids=pair_id)
def test_every_module(case: Any, scenario: Scenario) -> None:
    if (case, scenario) not in PAIRS:
        pytest.skip("a prompt that is pruned while it runs cannot be recorded")
    model, cache = prepared(case, scenario)
    clean = cache.fork()
    output = scenario.act(model, clean)
    after, next_token = facts(clean), probe(model, clean)
    runs_again = case[0] == "layer_condensed" and scenario.name in ("prefill", "second_turn", "recorded_forward")
    for index, (module, published) in enumerate(_places(model)):
        # Where the layers run several times, the first time is not the one that publishes.
        published = published and (module is model.lm_head or not runs_again)
        fork, error = cache.fork(), KINDS[index % len(KINDS)]()
        before = facts(fork)

        def fail(*_: Any, error: BaseException = error) -> None:
            raise error

        handle = module.register_forward_pre_hook(fail)
        with pytest.raises(type(error)):
            scenario.act(model, fork)
        handle.remove()
        if not published:
            if cache._runtime.waiting is None:  # else the acceptance is a publication of its own
                assert facts(fork) == before
            assert torch.equal(scenario.act(model, fork), output)
        assert facts(fork)["positions"] == after["positions"]
        assert fork.get_seq_length() == clean.get_seq_length()
        assert torch.equal(probe(model, fork), next_token)
        fork.check_integrity()


@pytest.mark.parametrize("case", CASES, ids=pair_id)
def test_failed_attention_and_failed_scores(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stock attention itself fails in each layer; the model's activations overflow."""
    model, cache = prepared(case, SCENARIOS[1])
    expected = feed(model, cache.fork(), 4, 31)
    real = torch.nn.functional.scaled_dot_product_attention
    for layer in range(2):
        calls = 0

        def fail(*args: Any, layer: int = layer, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == layer + 1:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return real(*args, **kwargs)

        before = facts(cache)
        with monkeypatch.context() as patch:
            patch.setattr(torch.nn.functional, "scaled_dot_product_attention", fail)
            with pytest.raises(torch.OutOfMemoryError):
                feed(model, cache, 4, 31)
        assert facts(cache) == before
    assert torch.equal(feed(model, cache.fork(), 4, 31), expected)


@pytest.mark.parametrize(("name", "width"), DECIDING)
def test_broken_activations_are_refused_and_leave_the_state(name: str, width: int) -> None:
    from hf_kvpolicy import SelectionError

    model, cache = prepared((name, small_options(name)), SCENARIOS[1])
    before, expected = facts(cache), feed(model, cache.fork(), width, 31)
    handle = model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *a: a[-1] * float("nan"))
    with pytest.raises(SelectionError, match=r"not finite|be finite"):
        feed(model, cache, width, 31)
    handle.remove()
    assert facts(cache) == before
    assert torch.equal(feed(model, cache, width, 31), expected)


def test_numbers_are_never_issued_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_kvpolicy.contract import GenerationClock

    issued: list[int] = []
    real = GenerationClock.successor

    def record(self: GenerationClock, *args: Any, **kwargs: Any) -> Any:
        numbers = real(self, *args, **kwargs)
        issued.append(numbers.cache)
        return numbers

    monkeypatch.setattr(GenerationClock, "successor", record)
    model, cache = prepared(("streaming_llm", {"budget": 7, "sinks": 2}), SCENARIOS[1])
    for index in range(20):
        cache._runtime.observer = Injector(index, ValueError("injected"))
        with pytest.raises(ValueError, match="injected"):
            feed(model, cache, 1, 31)
    cache._runtime.observer = None
    feed(model, cache, 1, 31)
    cache.reset()
    assert len(set(issued)) == len(issued)
    assert cache._runtime.snapshot.generations.cache == max(issued)


def test_a_refused_call_does_not_accept_what_waits() -> None:
    """Inputs are validated before any state moves."""
    from helpers import PRUNING, forward, prompt

    from hf_kvpolicy import ConfigError

    for case in CASES:
        if case[0] in PRUNING:  # takes no recorded prompt
            continue
        model, cache = prepared(case, next(s for s in SCENARIOS if s.name == "accept_some"))
        before, waiting = facts(cache), cache._runtime.waiting
        with pytest.raises(ConfigError):
            forward(model, prompt(1, 5, 3), cache)
        with pytest.raises(ConfigError):
            forward(model, prompt(1, 5, 2), cache, attention_mask=torch.ones(2, 3))
        assert facts(cache) == before
        assert cache._runtime.waiting is waiting
