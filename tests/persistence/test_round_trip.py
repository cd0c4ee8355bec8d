"""A loaded cache is the saved one: the same records, the same bytes, and bit for bit the same next tokens."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import PRUNING, case_id, forward, left_padded, make_cache, policy_units, prompt, stored_otherwise, tiny
from torch import Tensor

import hf_kvpolicy as kv

HOLD = [
    ("snapkv", {"budget": 8, "window": 3, "chunked_prefill": "hold"}),
    ("random", {"budget": 8, "window": 3, "chunked_prefill": "hold", "unit": "layer"}),
]
CASES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    *policy_units(),
    *stored_otherwise(),
    *HOLD,
    ("snapkv", {"budget": 0.5, "window": 3, "on_append": "append", "group": "max", "pooling": "avg", "protect": [2]}),
    ("sliding_window", {"budget": "8KiB"}),
    ("streaming_llm", {"budget": 9, "sinks": 2, "protect": range(4, 6)}),
]


class Session:
    """A batch of two rows, one padded, driven step by step; the mask is all it remembers."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache
        self.ids, self.mask = left_padded([prompt(14, 1), prompt(9, 2)])

    def prefill(self) -> Session:
        self._run(self.ids)
        return self

    def feed(self, length: int, seed: int) -> Tensor:
        self.mask = torch.cat([self.mask, torch.ones((2, length), dtype=torch.long)], dim=1)
        return self._run(prompt(length, seed, 2))

    def _run(self, ids: Tensor) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.no_grad():
            return forward(self.model, ids, self.cache, attention_mask=self.mask, position_ids=positions)

    def continued_by(self, cache: Any) -> Session:
        twin = Session(self.model, cache)
        twin.mask = self.mask.clone()
        return twin


def _decoded(session: Session) -> None:
    session.prefill()
    for step in range(4):
        session.feed(1, step)


def _second_turn(session: Session) -> None:
    _decoded(session)
    session.feed(5, 9)
    session.feed(1, 10)


def _cropped(session: Session) -> None:
    session.prefill()
    session.cache.activate_past_recording()
    session.feed(4, 9)
    session.cache.crop(-2)
    session.mask = session.mask[:, :-2]


def _reordered(session: Session) -> None:
    _decoded(session)
    session.cache.reorder_cache(torch.tensor([1, 0]))
    session.mask = session.mask[[1, 0]]


def _chunk_after_chunk(session: Session) -> None:
    session.prefill()
    session.feed(4, 9)


MOMENTS: dict[str, Callable[[Session], Any]] = {
    "prefilled": Session.prefill,
    "decoded": _decoded,
    "second_turn": _second_turn,
    "recording_and_cropped": _cropped,
    "reordered": _reordered,
    "two_chunks": _chunk_after_chunk,
}


def records(cache: Any) -> dict[str, Any]:
    snapshot = cache._runtime.snapshot
    return {
        "manifest": cache.manifest.sha256,
        "receipt": cache.receipt,
        "state": (cache.state.generations, cache.state.frontiers, cache.state.selected_original_positions),
        "ledger": cache.ledger(),
        "statistics": cache.statistics,
        "columns": cache.get_seq_length(),
        "recording": cache.is_recording_past(),
        "width": snapshot.width,
        "open": snapshot.open_segment is not None,
        "highest": cache._runtime.clock.highest,
        "class": type(cache),
        "repr": repr(cache),
    }


def place(moment: str) -> tuple[str, str]:
    """Return the family and backend a moment is tested on."""
    return ("mistral_window", "eager") if moment in ("decoded", "two_chunks") else ("llama", "sdpa")


@pytest.mark.filterwarnings("ignore:.*two prompt segments follow.*")
@pytest.mark.parametrize(
    "moment", [pytest.param(m, marks=pytest.mark.proves("saved", family=place(m)[0]), id=m) for m in MOMENTS]
)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_continues_bit_for_bit(case: Any, moment: str, tmp_path: Path) -> None:
    if case[0] in PRUNING and MOMENTS[moment] is _cropped:
        pytest.skip("a prompt that is pruned while it runs cannot be recorded")
    model = tiny(*place(moment))
    session = Session(model, make_cache(case[0], model, **case[1]))
    MOMENTS[moment](session)
    cache = session.cache
    cache.save_pretrained(tmp_path / "cache")
    loaded = kv.load_cache(tmp_path / "cache", model)
    assert records(loaded) == records(cache)
    twin = session.continued_by(loaded)
    for step, length in enumerate((1, 1, 4, 1, 1)):
        assert torch.equal(session.feed(length, 30 + step), twin.feed(length, 30 + step)), step
        if step == 2 and cache.is_recording_past():
            cache.crop(-1)
            loaded.crop(-1)
            session.mask, twin.mask = session.mask[:, :-1], twin.mask[:, :-1]
    loaded.check_integrity()
    loaded.crop(0)
    cache.crop(0)
    assert records(loaded) == records(cache)


@pytest.mark.parametrize("family", ["llama", "mistral_window"])
@pytest.mark.parametrize("case", HOLD, ids=case_id)
def test_an_open_prompt_keeps_its_rule_and_queries(case: Any, family: str, tmp_path: Path) -> None:
    model = tiny(family)
    session = Session(model, make_cache(case[0], model, **case[1])).prefill()
    session.cache.save_pretrained(tmp_path / "cache")
    twin = session.continued_by(kv.load_cache(tmp_path / "cache", model))
    facts = json.loads((tmp_path / "cache" / "cache.json").read_text())["record"]["snapshot"]["open_segment"]
    expected = {"kind": "causal"} if family == "llama" else {"kind": "sliding_window", "tokens": 7}
    assert facts["rule"] == expected
    session.feed(5, 1)
    twin.feed(5, 1)
    for one in (session, twin):
        one.cache.finish_prefill()
    assert records(session.cache) == records(twin.cache)
    assert torch.equal(session.feed(1, 2), twin.feed(1, 2))


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_an_empty_cache_and_a_reset_one(case: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    session = Session(model, make_cache(case[0], model, **case[1]))
    for place in ("empty", "reset"):
        session.cache.save_pretrained(tmp_path / place)
        loaded = kv.load_cache(tmp_path / place, model)
        assert records(loaded) == records(session.cache)
        twin = Session(model, loaded).prefill()
        fresh = Session(model, session.cache).prefill()
        assert torch.equal(fresh.feed(1, 3), twin.feed(1, 3))
        session.cache.reset()


def test_a_byte_budget_stays_resolved(tmp_path: Path) -> None:
    model = tiny("llama")
    session = Session(model, kv.SlidingWindowCache(model, budget="4KiB")).prefill()
    session.cache.save_pretrained(tmp_path / "cache")
    loaded = kv.load_cache(tmp_path / "cache", model)
    assert loaded._runtime.snapshot.budget_rows == session.cache._runtime.snapshot.budget_rows


def test_loading_does_not_share_storage(tmp_path: Path) -> None:
    """A tensor of the file is a window on the whole file; buffers are storages of their own, and writable."""
    model = tiny("llama")
    session = Session(model, kv.StreamingLLMCache(model, budget=7)).prefill()
    session.cache.save_pretrained(tmp_path / "cache")
    loaded = kv.load_cache(tmp_path / "cache", model)
    (tmp_path / "cache" / "cache.safetensors").write_bytes(b"")
    twin = session.continued_by(loaded)
    assert torch.equal(session.feed(1, 3), twin.feed(1, 3))
    loaded.check_integrity()


def test_half_precision(tmp_path: Path) -> None:
    model = tiny("llama").to(torch.bfloat16)
    session = Session(model, kv.SnapKVCache(model, budget=8, window=3)).prefill()
    session.cache.save_pretrained(tmp_path / "cache")
    twin = session.continued_by(kv.load_cache(tmp_path / "cache", model))
    assert torch.equal(session.feed(1, 3), twin.feed(1, 3))


CHILD = """
import sys, torch
torch.set_num_threads(1)
sys.path[:0] = sys.argv[3:]
import hf_kvpolicy as kv
from helpers import CACHE, prompt, tiny
model = tiny("llama", sys.argv[2])
place = sys.argv[1]
cache = kv.load_cache(place + "/cache", model)
with torch.no_grad():
    steps = [model(prompt(n, 40 + i), **{CACHE: cache}, use_cache=True).logits for i, n in enumerate((1, 4, 1))]
cache.check_integrity()
cache.save_pretrained(place + "/child")
torch.save(steps, place + "/logits.pt")
"""


@pytest.mark.parametrize(("name", "backend"), [("snapkv", "sdpa"), ("streaming_llm", "eager")])
def test_another_process_continues(name: str, backend: str, tmp_path: Path) -> None:
    model = tiny("llama", backend)
    cache = make_cache(name, model, budget=8) if name == "streaming_llm" else kv.SnapKVCache(model, budget=8, window=3)
    with torch.no_grad():
        forward(model, prompt(14, 1), cache)
        forward(model, prompt(1, 2), cache)
        cache.save_pretrained(tmp_path / "cache")
        steps = [forward(model, prompt(n, 40 + i), cache) for i, n in enumerate((1, 4, 1))]
    tests = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path), backend, tests], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    theirs = torch.load(tmp_path / "logits.pt")
    assert all(torch.equal(a, b) for a, b in zip(steps, theirs, strict=True))
    back = kv.load_cache(tmp_path / "child", model)
    assert records(back) == records(cache)
