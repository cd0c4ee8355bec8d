"""Lives of a cache: operations on it, on a plain model of it, and the check after each one."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
from condensed import CondensedOracle
from helpers import PRUNING, forward, make_cache, policy_units, prompt, stored_otherwise, tiny
from merged import MergedOracle, SegmentsOracle
from oracle import MAX_HELD_BACK, Oracle
from pruned import PrunedOracle
from quantized import QuantizedOracle, QuantizedPrunedOracle

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
    ("sliding_window", {"budget": 7, "chunked_prefill": "hold"}),
    ("streaming_llm", {"budget": 9, "sinks": 2, "chunked_prefill": "hold"}),
    ("h2o", {"budget": 8, "chunked_prefill": "hold"}),
    ("h2o", {"budget": 0.5, "protect": [2], "unit": "layer"}),
    ("keyformer", {"budget": 8, "recent_ratio": 0.5, "chunked_prefill": "hold", "variant": "reference"}),
    ("scissorhands", {"budget": 8, "recent": 2, "history": 12, "chunked_prefill": "hold", "unit": "token"}),
    ("adakv", {"budget": 0.5, "window": 2, "alpha": 1.0, "chunked_prefill": "hold", "protect": [1, 4]}),
    ("adakv", {"budget": 7, "window": 2, "alpha": 0.7, "evidence": "h2o", "on_append": "append"}),
    ("adakv", {"budget": 9, "window": 2, "layers": "pyramid", "beta": 3, "chunked_prefill": "bounded"}),
    ("pyramidkv", {"budget": 7, "window": 2, "beta": 2, "chunked_prefill": "hold"}),
    ("zigzagkv", {"budget": 0.4, "window": 2, "group": "max", "unit": "layer", "chunked_prefill": "hold"}),
    ("sliding_window", {"budget": 0.5}),
    ("sliding_window", {"budget": 6, "protect": [2]}),
    ("streaming_llm", {"budget": 8, "sinks": 2, "protect": [5, 9]}),
    ("streaming_llm", {"budget": 0.5, "sinks": 3}),
    ("streaming_llm", {"budget": 6, "sinks": 0}),
    ("streaming_llm", {"budget": 8, "sinks": 2, "positions": "original", "protect": [4]}),
    ("pyramidinfer", {"decay": 0.5, "sinks": 1, "min_context": 2, "decode_block": 2, "recent_ratio": 0.3}),
    (
        "pyramidinfer",
        {"budget": 0.5, "decay": 0.7, "sinks": 2, "min_context": 2, "decode_block": 4, "protect": [9, 14]},
    ),
    ("pyramidinfer", {"budget": 9, "decay": 0.7, "decode_block": 3, "on_append": "append", "group": "max"}),
    ("pyramidinfer", {"decay": 1.0, "decode_block": 3, "decode_ratio": 0.5, "chunked_prefill": "bounded"}),
    ("minicache", {"start_layer": 0, "retention": 0.0}),
    ("minicache", {"start_layer": 0, "retention": 1.0, "interpolation": 0.0}),
]


def _is_double(name: str, options: dict[str, Any]) -> bool:
    return name in ("sliding_window", "streaming_llm") and options.get("unit", "token") != "token"


CASES = [
    ("full", {}),
    *(case for case in policy_units() if not _is_double(*case)),
    *MIXES,
    *stored_otherwise(),
    ("h2o", {"budget": 16, "recent_ratio": 0.25, "quantize": "int4", "block_rows": 3}),
    ("streaming_llm", {"budget": 12, "sinks": 2, "protect": [5], "quantize": "int4", "block_rows": 4}),
]

ORACLES = {"minicache": MergedOracle, "dmc": SegmentsOracle, "layer_condensed": CondensedOracle}

# Per operation: how often it is drawn against the others, and the range of its number.
OPERATIONS: dict[str, tuple[int, int, int]] = {
    "token": (12, 1, 1),
    "feed": (5, 1, 9),
    "record": (3, 0, 1),
    "crop": (4, 0, 6),
    **dict.fromkeys(["reorder", "repeat", "select", "fork", "finish", "fail", "save", "rollback"], (1, 0, 5)),
    "branch": (1, 0, 5),
    "offload": (1, 0, 2),
    "prefetch": (1, 0, 2),
    "reset": (1, 0, 2),
}


class Life:
    """Interprets operations on a cache and on its oracle; a fork adds another pair."""

    def __init__(self, case: Any, family: str) -> None:
        self.model = tiny(family)
        cache = make_cache(case[0], self.model, **case[1])
        kinds = (QuantizedOracle, QuantizedPrunedOracle) if cache.composition.quantizes else (Oracle, PrunedOracle)
        kind = MergedOracle if cache.composition.merges_layers else ORACLES.get(case[0], kinds[case[0] in PRUNING])
        oracle = kind.of(cache)
        if isinstance(oracle, MergedOracle):
            oracle.merges_none = cache.composition.representation.merges_none
        self.lanes = [(cache, oracle)]
        self.seed = 0

    def apply(self, operation: str, number: Any, lane: int) -> None:
        index = lane % len(self.lanes)
        others = [(cache, copy.deepcopy(oracle)) for i, (cache, oracle) in enumerate(self.lanes) if i != index]
        getattr(self, operation)(index, number)
        for cache, oracle in [self.lanes[index], *others]:
            oracle.check(cache)

    def token(self, index: int, number: int) -> None:
        self.feed(index, 1)

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
        if oracle.refuses():
            with pytest.raises(kv.ConfigError, match="past recording"):
                self._forward(cache, oracle, new)
            return
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

    def record(self, index: int, number: int) -> None:
        cache, oracle = self.lanes[index]
        cache.set_recording(bool(number))
        oracle.record(bool(number))

    def crop(self, index: int, removed: int) -> None:
        cache, oracle = self.lanes[index]
        if removed > oracle.fed:
            with pytest.raises(kv.ConfigError):
                cache.crop(-removed)
        elif not oracle.can_crop(removed):
            with pytest.raises(kv.StaleGenerationError, match=cache.composition.before_taking_back.split("(")[0]):
                cache.crop(-removed)
        else:
            assert removed < MAX_HELD_BACK
            try:
                cache.crop(-removed)
            except kv.StaleGenerationError as error:
                # Of a held prompt no more queries are kept than choose: see tests/parity/test_held_prompts.py.
                if not oracle.hold or "last queries of a held prompt" not in str(error):
                    raise
            else:
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
        if oracle.refuses() or oracle.waiting is not None or (oracle.is_open and length == 1):
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
        if number == 2:
            cache.reset()
            oracle.reset()

    def branch(self, index: int, number: int) -> None:
        cache, oracle = self.lanes[index]
        kept = copy.deepcopy(oracle)
        with cache.branch():
            for act, value in (("feed", 1 + number), ("token", 1), ("crop", number % 3)):
                getattr(self, act)(index, value)
                oracle.check(cache)
        self.lanes[index] = (cache, kept)

    def offload(self, index: int, number: int) -> None:
        cache, before = self.lanes[index][0], self.lanes[index][0].ledger()
        cache.offload(None if number == 2 else number)
        assert cache.ledger() == before

    def prefetch(self, index: int, number: int) -> None:
        self.lanes[index][0].prefetch(None if number == 2 else number)
