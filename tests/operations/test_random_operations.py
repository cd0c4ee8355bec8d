"""Random lives of a cache: integrity, bytes, lengths and row counts are always what a plain model says."""

from __future__ import annotations

import copy
import tempfile
import warnings
from typing import Any

import pytest
import torch
from helpers import case_id, forward, policy_units, prompt, tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import MAX_HELD_BACK, Oracle

import hf_kvpolicy as kv
from hf_kvpolicy.contract import Phase

MIXES: list[tuple[str, dict[str, Any]]] = [
    ("snapkv", {"budget": 7, "window": 2, "chunked_prefill": "hold"}),
    ("snapkv", {"budget": 7, "window": 2, "chunked_prefill": "bounded", "unit": "layer", "group": "max"}),
    ("snapkv", {"budget": 0.4, "window": 2, "on_append": "append", "unit": "token"}),
    ("snapkv", {"budget": 0.5, "window": 2, "owner": "query_head", "chunked_prefill": "hold", "protect": [1, 4]}),
    ("snapkv", {"budget": 9, "window": 2, "on_append": "append", "chunked_prefill": "hold", "group": "sum"}),
    ("random", {"budget": 7, "window": 2, "chunked_prefill": "hold", "unit": "token"}),
    ("random", {"budget": 0.5, "window": 2, "protect": [0, 3]}),
    ("sliding_window", {"budget": 0.5}),
    ("sliding_window", {"budget": 6, "protect": [2]}),
    ("streaming_llm", {"budget": 8, "sinks": 2, "protect": [5, 9]}),
    ("streaming_llm", {"budget": 0.5, "sinks": 3}),
    ("streaming_llm", {"budget": 6, "sinks": 0}),
    ("streaming_llm", {"budget": 8, "sinks": 2, "positions": "original", "protect": [4]}),
    ("fastgen", {"recovery": 0.8, "sinks": 1, "chunked_prefill": "hold"}),
    ("fastgen", {"budget": 9, "sinks": 1, "protect": [5], "on_append": "append", "punctuation_token_ids": range(40)}),
    ("fastgen", {"budget": 0.5, "recovery": 1.0, "chunked_prefill": "hold", "on_append": "append"}),
]


def _is_double(name: str, options: dict[str, Any]) -> bool:
    return name in ("sliding_window", "streaming_llm") and options.get("unit", "token") != "token"


CASES = [("full", {}), *(case for case in policy_units() if not _is_double(*case)), *MIXES]

small = st.integers(0, 5)
OPERATIONS = st.one_of(
    st.tuples(st.just("feed"), st.integers(1, 1), small),
    st.tuples(st.just("feed"), st.integers(1, 9), small),
    st.tuples(st.just("record"), st.booleans(), small),
    st.tuples(st.just("crop"), st.integers(0, 6), small),
    st.tuples(
        st.sampled_from(["reorder", "repeat", "select", "fork", "finish", "fail", "save", "rollback"]), small, small
    ),
    st.tuples(st.just("reset"), st.sampled_from([0, 0, 1]), small),
)


class Life:
    """Interprets operations on a cache and on its oracle; a fork adds another pair."""

    def __init__(self, case: Any, family: str) -> None:
        self.model = tiny(family)
        cache = kv.make_cache(case[0], self.model, **case[1])
        self.lanes = [(cache, Oracle.of(cache))]
        self.seed = 0

    def apply(self, operation: str, number: Any, lane: int) -> None:
        index = lane % len(self.lanes)
        others = [(cache, copy.deepcopy(oracle)) for i, (cache, oracle) in enumerate(self.lanes) if i != index]
        getattr(self, operation)(index, number)
        for cache, oracle in [self.lanes[index], *others]:
            oracle.check(cache)

    def feed(self, index: int, length: int) -> None:
        cache, oracle = self.lanes[index]
        self.seed += 1
        rows = len(oracle.full_mask) or 2
        first = not oracle.fed
        new = [[1] * length for _ in range(rows)]
        if first and length > 2:
            new[-1][:2] = [0, 0]
        elif not first and self.seed % 5 == 0:
            new[0] = [0] * length  # a row that has finished
        elif not first and length > 2 and self.seed % 3 == 0:
            new[-1][-1] = 0
        logits = self._forward(cache, oracle, new)
        assert logits.isfinite().all()
        oracle.feed(new)

    def _forward(self, cache: Any, oracle: Oracle, new: list[list[int]]) -> torch.Tensor:
        old = oracle.full_mask or [[] for _ in new]
        mask = torch.tensor([a + b for a, b in zip(old, new, strict=True)])
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -len(new[0]) :]
        ids = prompt(len(new[0]), self.seed, len(new))
        with torch.no_grad():
            return forward(self.model, ids, cache, attention_mask=mask, position_ids=positions)

    def record(self, index: int, on: bool) -> None:
        cache, oracle = self.lanes[index]
        cache.set_recording(on)
        oracle.record(on)

    def crop(self, index: int, removed: int) -> None:
        cache, oracle = self.lanes[index]
        if removed > oracle.fed:
            with pytest.raises(kv.ConfigError):
                cache.crop(-removed)
        elif oracle.by_family and removed == oracle.fed and oracle.waiting is None:
            return  # whether a row was dropped before depends on scores
        elif not oracle.can_crop(removed):
            with pytest.raises(kv.StaleGenerationError, match="activate_past_recording"):
                cache.crop(-removed)
        else:
            assert removed < MAX_HELD_BACK
            cache.crop(-removed)
            oracle.crop(removed)

    def _rows(self, index: int) -> int:
        return len(self.lanes[index][1].full_mask)

    def _batch(self, index: int, rows: list[int]) -> None:
        self.lanes[index][1].batch(rows)

    def reorder(self, index: int, number: int) -> None:
        rows = [(i + number) % self._rows(index) for i in range(self._rows(index))]
        if rows:
            self.lanes[index][0].reorder_cache(torch.tensor(rows))
            self._batch(index, rows)

    def repeat(self, index: int, number: int) -> None:
        if 0 < self._rows(index) <= 2:
            self.lanes[index][0].batch_repeat_interleave(2)
            self._batch(index, [row for row in range(self._rows(index)) for _ in range(2)])

    def select(self, index: int, number: int) -> None:
        rows = list(range(self._rows(index)))
        rows = [rows[number % len(rows)], rows[0]] if rows else []
        if rows:
            self.lanes[index][0].batch_select_indices(torch.tensor(rows))
            self._batch(index, rows)

    def fork(self, index: int, number: int) -> None:
        cache, oracle = self.lanes[index]
        if len(self.lanes) < 3:
            twin = copy.deepcopy(cache) if number % 2 else cache.fork()
            self.lanes.append((twin, copy.deepcopy(oracle)))

    def finish(self, index: int, number: int) -> None:
        cache, oracle = self.lanes[index]
        cache.finish_prefill()
        oracle.accept(0, by_crop=False)
        oracle.finish()

    def fail(self, index: int, number: int) -> None:
        cache, oracle = self.lanes[index]
        length = 1 + number
        if oracle.waiting is not None or (oracle.is_open and length == 1):
            return  # there something else is published first
        self.seed += 1
        phases = list(Phase)[1 : Phase.PACK + 1]

        def fail(layer: int, phase: Phase) -> None:
            if layer == self.seed % 2 and phase == phases[self.seed % len(phases)]:
                raise torch.OutOfMemoryError("CUDA out of memory.")

        before, cache._runtime.observer = cache._runtime.snapshot, fail
        rows = self._rows(index) or 2
        with pytest.raises(torch.OutOfMemoryError):
            self._forward(cache, oracle, [[1] * length for _ in range(rows)])
        cache._runtime.observer = None
        assert cache._runtime.snapshot is before

    def rollback(self, index: int, number: int) -> None:
        self.lanes[index][0].rollback()

    def save(self, index: int, number: int) -> None:
        cache, oracle = self.lanes[index]
        with tempfile.TemporaryDirectory() as place:
            if oracle.waiting is not None:
                with pytest.raises(kv.ConfigError, match=r"crop\(0\)"):
                    cache.save_pretrained(f"{place}/cache")
                return
            cache.rollback()
            cache.save_pretrained(f"{place}/cache")
            loaded = kv.load_cache(f"{place}/cache", self.model)
        assert loaded.ledger() == cache.ledger()
        assert loaded.receipt == cache.receipt
        self.lanes[index] = (loaded, oracle)

    def reset(self, index: int, number: int) -> None:
        cache, oracle = self.lanes[index]
        if number:
            cache.reset()
            oracle.reset()


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
@pytest.mark.parametrize("case", CASES, ids=case_id)
@settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    database=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(operations=st.lists(OPERATIONS, min_size=6, max_size=16))
def test_random_lives(case: Any, family: str, operations: list[tuple[str, Any, int]]) -> None:
    life = Life(case, family)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*two prompt segments follow.*")
        life.apply("feed", 7, 0)
        for operation, number, lane in operations:
            life.apply(operation, number, lane)
