"""An interrupt at any line of the code that publishes: the state is the old one or the new one, never a mixture."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import pytest
import torch
from scenarios import SCENARIOS, Scenario, facts, pair_id, prepared, probe

from hf_kvpolicy.engine import exclusive, runtime

FILES = {exclusive.__file__, runtime.__file__}
CASES = [
    ("streaming_llm", {"budget": 7, "sinks": 2}),
    ("snapkv", {"budget": 8, "window": 3, "kernel_size": 3, "unit": "token"}),
]
NAMES = ("decode", "second_turn", "accept_some", "accept_by_forward", "recorded_forward", "reorder_waiting")


class LineInterrupt:
    """Raises KeyboardInterrupt at the n-th executed line of the runtime."""

    def __init__(self, at: int | None) -> None:
        self.at, self.lines = at, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.trace if frame.f_code.co_filename in FILES else None

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.lines += 1
            if self.lines - 1 == self.at:
                raise KeyboardInterrupt
        return self.trace

    def run(self, act: Any) -> None:
        before, grad = sys.gettrace(), torch.is_grad_enabled()
        sys.settrace(self)
        try:
            act()
        finally:
            sys.settrace(before)
            # A trace function may raise where no signal can: after a block's last line, before its __exit__ runs.
            torch.set_grad_enabled(grad)


@pytest.mark.parametrize("scenario", [s for s in SCENARIOS if s.name in NAMES], ids=pair_id)
@pytest.mark.parametrize("case", CASES, ids=pair_id)
def test_every_line(case: Any, scenario: Scenario) -> None:
    model, cache = prepared(case, scenario)
    clean = cache.fork()
    counter = LineInterrupt(None)
    counter.run(lambda: scenario.act(model, clean))
    after, next_token = facts(clean), probe(model, clean)
    assert counter.lines > 20
    for line in range(counter.lines):
        fork = cache.fork()
        with pytest.raises(KeyboardInterrupt):
            LineInterrupt(line).run(lambda fork=fork: scenario.act(model, fork))
        fork.check_integrity()
        assert fork._runtime._lock.acquire(blocking=False), "the interrupt left the cache locked"
        fork._runtime._lock.release()
        fork.rollback()
        unchanged = _shape(fork) == _shape(cache)
        if unchanged or _shape(fork) != _shape(clean):
            scenario.act(model, fork)
        assert _shape(fork) == _shape(clean), line
        assert facts(fork)["positions"] == after["positions"], line
        assert torch.equal(probe(model, fork), next_token), line


def _shape(cache: Any) -> Any:
    """Return what is visible: rows of every layer, waiting tokens, order of batch rows."""
    state, found = cache._runtime, facts(cache)
    waiting = None if state.waiting is None else (state.waiting.length, state.waiting.snapshot.frontier.tokens)
    return found["columns"], found["frontier"], found["positions"], waiting, state.snapshot.frontier.tokens
