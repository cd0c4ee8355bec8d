"""An idle cache may lie on the CPU: every tensor goes, comes back exactly, and a forward fetches what it needs.

Where only a CPU is present, the meta device stands in for the other one: its tensors hold no numbers, so whatever a
forward reads without fetching it first fails. A vault keeps the numbers that a move to it would lose.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import PRUNING, case_id, forward, left_padded, make_cache, policy_units, prompt, stored_otherwise, tiny
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.engine import published
from hf_kvpolicy.engine.placement import Moves
from hf_kvpolicy.ledger import _tensors

META = torch.device("meta")
HOLD = {"budget": 8, "window": 3, "chunked_prefill": "hold"}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    *policy_units(),
    *stored_otherwise(),
    ("snapkv", HOLD),
    ("h2o", {"budget": 8, "chunked_prefill": "hold"}),
    ("snapkv", {"budget": 0.5, "window": 3, "protect": [2]}),
]

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


class Session:
    """A batch of two rows, one padded."""

    def __init__(self, case: Any) -> None:
        self.model = tiny("llama")
        self.cache = make_cache(case[0], self.model, **case[1])
        self.ids, self.mask = left_padded([prompt(14, 1), prompt(9, 2)])
        self._run(self.ids)

    def feed(self, length: int, seed: int) -> Tensor:
        self.mask = torch.cat([self.mask, torch.ones((2, length), dtype=torch.long)], dim=1)
        return self._run(prompt(length, seed, 2))

    def crop(self, removed: int) -> None:
        self.cache.crop(-removed)
        self.mask = self.mask[:, : self.mask.shape[1] - removed]

    def _run(self, ids: Tensor) -> Tensor:
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        with torch.inference_mode():
            return forward(self.model, ids, self.cache, attention_mask=self.mask, position_ids=positions)


def _decoded(session: Session) -> None:
    for step in range(3):
        session.feed(1, step)


def _skip_pruning(session: Session) -> None:
    if session.cache.composition.policy in PRUNING:
        pytest.skip("a prompt that is pruned cannot wait for acceptance; its own tests see the refusal")


def _waiting(session: Session) -> None:
    _skip_pruning(session)
    session.feed(1, 5)
    session.cache.activate_past_recording()
    session.feed(4, 6)


def _waiting_prompt(session: Session) -> None:
    _skip_pruning(session)
    session.cache.reset()
    session.cache.activate_past_recording()
    session.ids, session.mask = left_padded([prompt(14, 1), prompt(9, 2)])
    session._run(session.ids)


def _chunks(session: Session) -> None:
    session.feed(4, 9)


MOMENTS: dict[str, Callable[[Session], None]] = {
    "prefilled": lambda session: None,
    "decoded": _decoded,
    "waiting": _waiting,
    "waiting_prompt": _waiting_prompt,
    "chunks": _chunks,
}


def snapshots(cache: Any) -> list[Any]:
    runtime = cache._runtime
    held = [runtime.snapshot, *([] if runtime.waiting is None else [runtime.waiting.snapshot])]
    return [snapshot for snapshot in held if snapshot.buffers]


def tensors(cache: Any) -> list[Tensor]:
    return [tensor for snapshot in snapshots(cache) for tensor in _tensors(snapshot)]


def records(cache: Any) -> dict[str, Any]:
    return {
        "ledger": cache.ledger(),
        "receipt": cache.receipt,
        "state": (cache.state.generations, cache.state.frontiers, cache.state.selected_original_positions),
        "columns": cache.get_seq_length(),
        "statistics": cache.statistics,
    }


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Offloading goes to the meta device, and what went there can be brought back."""
    vault: dict[int, tuple[Tensor, Tensor]] = {}
    real = torch.Tensor.to

    def to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if args and args[0] == META:
            gone = real(tensor, META)
            vault[id(gone)] = (gone, tensor.clone())
            return gone
        if tensor.device == META:
            return vault[id(tensor)][1].clone()
        return real(tensor, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(published, "OFFLOAD_DEVICE", META)


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_on_the_cpu_nothing_changes(case: Any, moment: str) -> None:
    session = Session(case)
    MOMENTS[moment](session)
    cache = session.cache
    before, held = records(cache), tensors(cache)
    cache.offload()
    assert records(cache) == before
    cache.prefetch()
    cache.offload(1)
    cache.layers[0].offload()
    cache.layers[0].prefetch()
    cache.prefetch(cache.num_layers)
    assert records(cache) == before
    assert all(a is b for a, b in zip(held, tensors(cache), strict=True))
    cache.check_integrity()


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_tensor_moves(case: Any, moment: str) -> None:
    session = Session(case)
    MOMENTS[moment](session)
    for snapshot in snapshots(session.cache):
        moved = snapshot.to(snapshot.placement.all_on(META), Moves())
        before, after = _tensors(snapshot), _tensors(moved)
        assert [(t.shape, t.dtype) for t in before] == [(t.shape, t.dtype) for t in after]
        assert {t.device for t in before} == {torch.device("cpu")}
        assert {t.device for t in after} == {META}


@pytest.mark.proves("offloaded", family="llama")
@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_a_forward_fetches_what_it_needs(case: Any, moment: str) -> None:
    session, twin = Session(case), Session(case)
    for each in (session, twin):
        MOMENTS[moment](each)
    cache = session.cache
    for number, (act, value) in enumerate([("feed", 1), ("feed", 1), ("feed", 4), ("crop", 0), ("feed", 1)]):
        cache.offload()
        assert {t.device for t in tensors(cache)} == {META}
        got, want = (getattr(s, act)(*((value, number) if act == "feed" else (value,))) for s in (session, twin))
        assert got is None or torch.equal(got, want)
        cache.prefetch()
        assert {t.device for t in tensors(cache)} == {torch.device("cpu")}
        assert records(cache) == records(twin.cache)
        cache.check_integrity()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_every_way_to_accept_fetches(case: Any) -> None:
    ways: list[Callable[[Session], Any]] = [
        lambda session: session.crop(2),
        lambda session: session.cache.finish_prefill(),
        lambda session: session.cache.set_recording(False),
    ]
    for way in ways:
        session, twin = Session(case), Session(case)
        for each in (session, twin):
            _waiting(each)
        session.cache.offload()
        for each in (session, twin):
            way(each)
        assert torch.equal(session.feed(1, 20), twin.feed(1, 20))
        assert records(session.cache) == records(twin.cache)


def growing(snapshot: Any, layer: int) -> tuple[Any, ...]:
    """The segments of a layer that tokens still join; none where tokens are not merged."""
    trailing = snapshot.ragged[layer].trailing if snapshot.ragged else None
    return () if trailing is None else trailing.tensors()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_layers_leave_one_by_one(case: Any) -> None:
    session = Session(case)
    _decoded(session)
    cache, snapshot = session.cache, session.cache._runtime.snapshot
    if snapshot.pairs:
        pytest.skip("a pair of layers leaves with the deeper one; tests/spec/test_minicache.py")
    if snapshot.producers:
        pytest.skip("a layer without a store leaves with its producer; tests/spec/test_layer_condensed.py")
    own = [[*rows.tensors(), *growing(snapshot, layer)] for layer, rows in enumerate(snapshot.buffers)]
    rows = {id(tensor) for layer in own for tensor in layer}
    shared = sum(id(tensor) not in rows for tensor in _tensors(snapshot))
    cache.layers[0].offload()
    here = [t for t in tensors(cache) if t.device != META]
    assert cache.layers[0].keys.device == META != cache.layers[1].keys.device
    assert len(here) == shared + len(own[1])
    cache.offload(1)
    assert not [t for t in tensors(cache) if t.device != META]
    cache.prefetch(0)
    assert len([t for t in tensors(cache) if t.device == META]) == len(own[1])
    cache.prefetch(1)
    assert cache._runtime.snapshot.home is None
    cache.check_integrity()


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_copies_of_what_is_away_are_away(case: Any, moment: str) -> None:
    session = Session(case)
    MOMENTS[moment](session)
    cache = session.cache
    shared = [len({id(rows) for s in snapshots(cache) for rows in s.rows})]
    cache.offload()
    twin = cache.fork()
    shared += [len({id(rows) for s in snapshots(c) for rows in s.rows}) for c in (cache, twin)]
    assert len(set(shared)) == 1, "what waits lies in the published buffers before, during and in a copy"
    assert {t.device for t in tensors(twin)} == {META}
    assert [s.home for s in snapshots(twin)] == [s.home for s in snapshots(cache)]
    with cache.branch():
        # Whose the exceptions of merged rows are is read where they lie; the stand-in device has no numbers.
        if not snapshots(cache)[0].pairs:
            cache.reorder_cache(torch.tensor([0, 0]))
        assert {t.device for t in tensors(cache)} == {META}
    assert {t.device for t in tensors(cache)} == {META}
    cache.prefetch()
    cache.check_integrity()


@pytest.mark.usefixtures("elsewhere")
def test_an_emptied_cache_has_nothing_away(tmp_path: Any) -> None:
    session = Session(("full", {}))
    session.cache.offload()
    session.cache.reset()
    assert session.cache._runtime.snapshot.home is None
    session.cache.offload()
    session.cache.prefetch()
    session.cache.check_integrity()


def test_an_offloaded_cache_can_be_saved(tmp_path: Any) -> None:
    session = Session(("h2o", {"budget": 8}))
    session.cache.offload()
    session.cache.save_pretrained(tmp_path / "cache")
    loaded = kv.load_cache(tmp_path / "cache", session.model)
    assert loaded.ledger() == session.cache.ledger()


def test_layers_that_do_not_exist_are_refused() -> None:
    session = Session(("full", {}))
    with pytest.raises(kv.ConfigError, match=r"layers 0\.\.1"):
        session.cache.offload(2)


def test_one_layer_cannot_be_reordered_alone_and_reset_empties_the_cache() -> None:
    session = Session(("snapkv", {"budget": 8, "window": 3}))
    with pytest.raises(kv.ConfigError, match=r"cache\.reorder_cache"):
        session.cache.layers[0].reorder_cache(torch.tensor([1, 0]))
    session.cache.check_integrity()
    session.cache.layers[0].reset()
    assert session.cache.get_seq_length() == 0
