"""The phase machine and the generation clock: order, all-layers publication, numbers never reused."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.contract import ALL_LAYERS, GenerationClock, Generations, Phase, Transaction
from hf_kvpolicy.errors import ConfigError, IntegrityError, KVPolicyError, StaleGenerationError

PARENT = Generations(request=11, cache=500, policy=7, state=30)
SUCCESSOR = Generations(request=11, cache=501, policy=7, state=31)
LAYER_PHASES = [Phase(i) for i in range(Phase.APPEND, Phase.PACK + 1)]


def _packed(num_layers: int = 2) -> Transaction:
    txn = Transaction(PARENT, SUCCESSOR, num_layers)
    for layer in range(num_layers):
        txn.enter_through(layer, Phase.PACK)
    return txn


def test_the_phases_are_those_of_the_contract_in_order() -> None:
    names = "BEGIN APPEND ATTEND SCORE PROTECT SELECT VALIDATE ADMIT RESERVE PACK PUBLISH RELEASE EXPORT"
    assert [phase.name for phase in Phase] == names.split()


def test_a_whole_transaction() -> None:
    seen: list[tuple[int, Phase]] = []
    txn = Transaction(PARENT, SUCCESSOR, 2, observer=lambda layer, phase: seen.append((layer, phase)))
    for layer in range(2):
        for phase in LAYER_PHASES:
            txn.enter(layer, phase)
    assert txn.phase == Phase.PACK
    assert txn.is_open
    assert not txn.is_published
    txn.publish(PARENT)
    assert txn.is_published
    assert not txn.is_open
    assert txn.phase == Phase.PUBLISH
    txn.release()
    txn.export()
    assert txn.phase == Phase.EXPORT
    assert seen[0] == (ALL_LAYERS, Phase.BEGIN)
    assert seen[1:19] == [(layer, phase) for layer in range(2) for phase in LAYER_PHASES]
    assert seen[19:] == [(ALL_LAYERS, p) for p in (Phase.PUBLISH, Phase.RELEASE, Phase.EXPORT)]


def test_layers_may_interleave_and_a_phase_may_be_entered_again() -> None:
    txn = Transaction(PARENT, SUCCESSOR, 2)
    txn.enter(0, Phase.APPEND)
    txn.enter(0, Phase.APPEND)
    txn.enter(1, Phase.APPEND)
    txn.enter(0, Phase.ATTEND)
    assert (txn.layer_phase(0), txn.layer_phase(1), txn.phase) == (Phase.ATTEND, Phase.APPEND, Phase.APPEND)


@pytest.mark.parametrize("skipped", LAYER_PHASES[:-1])
def test_no_phase_may_be_skipped(skipped: Phase) -> None:
    txn = Transaction(PARENT, SUCCESSOR, 1)
    if skipped > Phase.APPEND:
        txn.enter_through(0, Phase(skipped - 1))
    with pytest.raises(IntegrityError, match=f"Enter {skipped.name} next"):
        txn.enter(0, Phase(skipped + 1))
    with pytest.raises(IntegrityError, match="not reached PACK"):
        txn.publish(PARENT)


def test_phases_do_not_go_back() -> None:
    txn = Transaction(PARENT, SUCCESSOR, 1)
    txn.enter_through(0, Phase.SELECT)
    for enter in (txn.enter, txn.enter_through):
        with pytest.raises(IntegrityError, match="is at SELECT and cannot enter SCORE"):
            enter(0, Phase.SCORE)


@pytest.mark.parametrize("phase", [Phase.PUBLISH, Phase.RELEASE, Phase.EXPORT])
def test_no_layer_publishes_alone(phase: Phase) -> None:
    with pytest.raises(IntegrityError, match="all layers at once"):
        _packed().enter(0, phase)


@pytest.mark.parametrize("layer", [-1, 2])
def test_unknown_layers_are_refused(layer: int) -> None:
    with pytest.raises(IntegrityError, match="does not exist"):
        Transaction(PARENT, SUCCESSOR, 2).enter(layer, Phase.APPEND)


def test_half_a_publication_is_impossible_and_names_the_layers() -> None:
    txn = Transaction(PARENT, SUCCESSOR, 4)
    txn.enter_through(0, Phase.PACK)
    txn.enter_through(2, Phase.RESERVE)
    with pytest.raises(IntegrityError, match=r"Layers \[1, 2, 3\]"):
        txn.publish(PARENT)
    assert not txn.is_published
    assert txn.is_open


@pytest.mark.parametrize("name", ["request", "cache", "policy", "state"])
def test_publication_compares_every_parent_number(name: str) -> None:
    txn = _packed()
    with pytest.raises(StaleGenerationError, match="began at"):
        txn.publish(replace(PARENT, **{name: 999}))
    assert not txn.is_published
    txn.abort("stale")
    assert not txn.is_open


def test_release_and_export_follow_publication_once_each() -> None:
    txn = _packed()
    with pytest.raises(IntegrityError, match="RELEASE follows PUBLISH"):
        txn.release()
    txn.publish(PARENT)
    with pytest.raises(IntegrityError, match="EXPORT follows RELEASE"):
        txn.export()
    txn.release()
    with pytest.raises(IntegrityError, match="RELEASE"):
        txn.release()
    txn.export()
    with pytest.raises(IntegrityError, match="EXPORT"):
        txn.export()


def test_abort_is_idempotent_before_and_impossible_after_publication() -> None:
    txn = Transaction(PARENT, SUCCESSOR, 1)
    txn.enter(0, Phase.APPEND)
    txn.abort("out of memory")
    txn.abort("again")
    assert txn.abort_reason == "out of memory"
    assert txn.phase == Phase.APPEND
    with pytest.raises(IntegrityError, match="aborted"):
        txn.enter(0, Phase.ATTEND)
    with pytest.raises(IntegrityError, match="aborted"):
        txn.publish(PARENT)
    with pytest.raises(IntegrityError, match="aborted"):
        txn.release()
    published = _packed()
    published.publish(PARENT)
    with pytest.raises(IntegrityError, match="compensating successor"):
        published.abort("too late")
    with pytest.raises(IntegrityError, match="already published"):
        published.publish(PARENT)
    assert published.is_published


def test_a_failing_observer_leaves_the_phase_unentered() -> None:
    def fail_at(layer: int, phase: Phase) -> None:
        if phase in (Phase.PACK, Phase.PUBLISH) and armed:
            raise RuntimeError(phase.name)

    armed = [1]
    txn = Transaction(PARENT, SUCCESSOR, 1, observer=fail_at)
    with pytest.raises(RuntimeError, match="PACK"):
        txn.enter_through(0, Phase.PACK)
    assert txn.phase == Phase.RESERVE
    armed.clear()
    txn.enter(0, Phase.PACK)
    armed.append(1)
    with pytest.raises(RuntimeError, match="PUBLISH"):
        txn.publish(PARENT)
    assert not txn.is_published


@pytest.mark.parametrize(
    "successor",
    [
        PARENT,
        replace(SUCCESSOR, request=12),
        replace(SUCCESSOR, cache=499),
        replace(SUCCESSOR, state=29),
        replace(SUCCESSOR, policy=6),
    ],
)
def test_a_successor_follows_its_parent(successor: Generations) -> None:
    with pytest.raises(IntegrityError, match="does not follow"):
        Transaction(PARENT, successor, 1)


def test_one_counter_may_advance_alone() -> None:
    Transaction(PARENT, replace(PARENT, state=31), 1)
    Transaction(PARENT, replace(PARENT, cache=501), 1)
    with pytest.raises(ConfigError, match="num_layers"):
        Transaction(PARENT, SUCCESSOR, 0)


def test_cancelled_numbers_are_consumed() -> None:
    """Published 103/3, candidate 104/4 cancelled, the resume publishes 105/5 (0x05)."""
    published = Generations(request=0, cache=103, policy=0, state=3)
    clock = GenerationClock(published)
    candidate = clock.successor(published)
    assert (candidate.cache, candidate.state) == (104, 4)
    resumed = clock.successor(published)
    assert (resumed.cache, resumed.state) == (105, 5)
    txn = Transaction(published, resumed, 1)
    txn.enter_through(0, Phase.PACK)
    txn.publish(published)
    late = Transaction(published, candidate, 1)
    late.enter_through(0, Phase.PACK)
    with pytest.raises(StaleGenerationError):
        late.publish(txn.successor)


def test_the_printed_generations() -> None:
    """State 30 -> 31 and cache 500 -> 501 (0x0EB); cache 200 -> 201 and state 10 -> 11 (0x07H)."""
    assert GenerationClock(PARENT).successor(PARENT) == SUCCESSOR
    prompt = Generations(request=3, cache=200, policy=60, state=10)
    assert GenerationClock(prompt).successor(prompt) == replace(prompt, cache=201, state=11)


def test_counters_advance_separately_and_foreign_parents_are_refused() -> None:
    clock = GenerationClock(PARENT)
    assert clock.successor(PARENT, cache=False) == replace(PARENT, state=31)
    assert clock.successor(PARENT, request=True, policy=True).policy == 8
    assert clock.highest == Generations(request=12, cache=501, policy=8, state=32)
    with pytest.raises(IntegrityError, match="never issued"):
        clock.successor(replace(PARENT, cache=900))
    with pytest.raises(ConfigError, match="generation cache"):
        Generations(request=0, cache=-1, policy=0, state=0)


STEPS = st.lists(st.tuples(st.integers(-1, 3), st.sampled_from(list(Phase))), max_size=80)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS)
def test_random_orders_never_publish_half(steps: list[tuple[int, Phase]]) -> None:
    txn = Transaction(PARENT, SUCCESSOR, 3)
    reached = [Phase.BEGIN] * 3
    for layer, phase in steps:
        try:
            txn.enter(layer, phase)
        except IntegrityError:
            pass
        else:
            assert phase in (reached[layer], reached[layer] + 1)
            reached[layer] = phase
        if phase == Phase.PUBLISH:
            try:
                txn.publish(PARENT)
            except IntegrityError:
                assert min(reached) < Phase.PACK
            else:
                assert min(reached) == Phase.PACK
                break
    assert not txn.is_published or all(p == Phase.PACK for p in reached)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_random_schedules_publish_only_complete_successors_and_reuse_no_number(data: st.DataObject) -> None:
    current = Generations(request=0, cache=0, policy=0, state=0)
    clock = GenerationClock(current)
    issued: set[tuple[str, int]] = set()
    for _ in range(data.draw(st.integers(1, 8))):
        candidate = clock.successor(current)
        numbers = {("cache", candidate.cache), ("state", candidate.state)}
        assert not numbers & issued
        issued |= numbers
        txn = Transaction(current, candidate, 2)
        stops = data.draw(st.lists(st.sampled_from([Phase.BEGIN, Phase.SELECT, Phase.PACK]), min_size=2, max_size=2))
        for layer, stop in enumerate(stops):
            txn.enter_through(layer, stop)
        try:
            txn.publish(current)
        except KVPolicyError:
            txn.abort("incomplete")
            assert min(stops) < Phase.PACK
        else:
            assert min(stops) == Phase.PACK
            current = txn.successor
    assert ("cache", current.cache) in issued or current.cache == 0
