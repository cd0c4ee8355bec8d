"""`crop(-r)` after recording equals never having fed those r tokens; without recording it is exact or refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers import (
    PRUNING,
    assert_same_content,
    can_be_neutral,
    case_id,
    forward,
    generate,
    has_budget,
    is_lossy,
    kept_positions,
    left_padded,
    make_cache,
    only_budget,
    policies,
    policy_units,
    prompt,
    small_options,
    stored_otherwise,
    tiny,
)
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.registry import policy_class

CASES = [*(case for case in [*policy_units(), *stored_otherwise()] if case[0] not in PRUNING), ("full", {})]
# What a pruned prompt or a block of an answer drops is never computed or gone at once: nothing of it can wait.
REFUSE_RECORDING = [case for case in policy_units() if case[0] in PRUNING]
REJECTED = (0, 1, 4)

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


@pytest.fixture(params=CASES, ids=case_id)
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    name, options = request.param
    return name, options


def make(case: tuple[str, dict[str, Any]], model: Any, **options: Any) -> Any:
    return make_cache(case[0], model, **{**case[1], **options})


@pytest.fixture(params=[*CASES, *REFUSE_RECORDING], ids=case_id)
def any_case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    name, options = request.param
    return name, options


class Batch:
    """A left-padded batch fed piece by piece."""

    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self.cache = model, cache
        self.ids, self.mask = left_padded([prompt(n, seed=n) for n in (30, 3, 14)])
        more = prompt(40, seed=2, rows=3)
        self.ids = torch.cat([self.ids, more], dim=1)
        self.mask = torch.cat([self.mask, torch.ones_like(more)], dim=1)

    def feed(self, width: int, take: int | None = None) -> Tensor:
        """Feed the next `width` columns (or only the first `take` of them)."""
        start = self.cache.get_seq_length()
        stop = start + (width if take is None else take)
        positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, start:stop]
        with torch.no_grad():
            return forward(
                self.model,
                self.ids[:, start:stop],
                self.cache,
                attention_mask=self.mask[:, :stop],
                position_ids=positions,
            )[:, -1]


def assert_same_future(left: Batch, right: Batch) -> None:
    left.cache.check_integrity()
    right.cache.check_integrity()
    assert_same_content(left.cache, right.cache)
    assert left.cache.state.row_frontiers == right.cache.state.row_frontiers
    for width in (1, 1, 6, 1):
        torch.testing.assert_close(left.feed(width), right.feed(width), atol=2e-5, rtol=1e-4)
    assert_same_content(left.cache, right.cache, atol=2e-5)


@pytest.mark.proves("recorded")
@pytest.mark.parametrize("rejected", REJECTED)
@pytest.mark.parametrize("family", ["llama_head_dim", "mistral_window"])
def test_waiting_prompt(case: tuple[str, dict[str, Any]], family: str, rejected: int) -> None:
    """Assisted decoding's first forward carries the prompt and the first draft."""
    model = tiny(family)
    taken, never = Batch(model, make(case, model)), Batch(model, make(case, model))
    taken.cache.activate_past_recording()
    taken.feed(34)
    taken.cache.crop(-rejected)
    taken.cache.set_recording(False)
    never.feed(34 - rejected)
    assert_same_future(taken, never)


@pytest.mark.proves("recorded")
@pytest.mark.parametrize("rejected", REJECTED)
@pytest.mark.parametrize("family", ["llama", "mistral_window"])
def test_waiting_decode(case: tuple[str, dict[str, Any]], rejected: int, family: str) -> None:
    """Verification forwards of several tokens, one after another, as assisted decoding drives them."""
    model = tiny(family)
    taken, never = Batch(model, make(case, model)), Batch(model, make(case, model))
    for batch in (taken, never):
        batch.feed(30)
        batch.feed(1)
        batch.cache.activate_past_recording()
    for _ in range(3):
        before = taken.cache.get_seq_length()
        taken.feed(5)
        taken.cache.crop(-rejected)
        assert taken.cache.get_seq_length() == before + 5 - rejected
        never.feed(5, take=5 - rejected)
        never.cache.crop(0)
    for batch in (taken, never):
        batch.cache.set_recording(False)
    assert_same_future(taken, never)


@pytest.mark.parametrize("budget", [0.5, 12], ids=["ratio", "rows"])
def test_waiting_prompt_of_one_token(case: tuple[str, dict[str, Any]], budget: float) -> None:
    """The whole draft behind a prompt of one token is rejected; the ratio of that prompt is fixed all the same."""
    if not has_budget(case[0]):
        pytest.skip("a cache that selects nothing has no budget")
    model = tiny("llama")
    taken, never = (Batch(model, make(case, model, budget=budget)) for _ in range(2))
    for batch in (taken, never):
        batch.ids, batch.mask = prompt(60, rows=3), torch.ones(3, 60, dtype=torch.long)
    taken.cache.activate_past_recording()
    taken.feed(6)
    taken.cache.crop(-5)
    taken.cache.set_recording(False)
    never.feed(1)
    assert_same_future(taken, never)
    for batch in (taken, never):
        batch.feed(20)
    assert_same_future(taken, never)


@pytest.mark.parametrize("chunked", ["hold", "bounded"])
@pytest.mark.parametrize("rejected", [0, 3])
def test_waiting_prompt_with_declared_chunks(case: tuple[str, dict[str, Any]], chunked: str, rejected: int) -> None:
    if not has_budget(case[0]):
        pytest.skip("a cache that selects nothing has no chunked_prefill option")
    model = tiny("llama")
    taken = Batch(model, make(case, model, chunked_prefill=chunked))
    never = Batch(model, make(case, model, chunked_prefill=chunked))
    taken.feed(12)
    taken.cache.activate_past_recording()
    taken.feed(22)
    taken.cache.crop(-rejected)
    taken.cache.set_recording(False)
    never.feed(12)
    never.feed(22 - rejected)
    never.cache.finish_prefill()  # accepting a waiting prompt by `crop` ends it
    assert_same_future(taken, never)


@pytest.mark.parametrize("before", [(), (30,), (30, 1)], ids=str)
@pytest.mark.parametrize("width", [1, 5])
@pytest.mark.parametrize("case", REFUSE_RECORDING, ids=case_id)
def test_recorded_tokens_are_refused_and_change_nothing(case: Any, width: int, before: tuple[int, ...]) -> None:
    model = tiny("llama")
    taken, never = Batch(model, make(case, model)), Batch(model, make(case, model))
    for batch in (taken, never):
        for fed in before:
            batch.feed(fed)
    taken.cache.activate_past_recording()
    with pytest.raises(kv.ConfigError, match="past recording"):
        taken.feed(width)
    taken.cache.set_recording(False)
    for batch in (taken, never):
        batch.feed(20)
    assert_same_future(taken, never)


def test_rejecting_everything_leaves_the_parent(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    taken, never = Batch(model, make(case, model)), Batch(model, make(case, model))
    for batch in (taken, never):
        batch.feed(30)
        batch.feed(1)
    state = taken.cache.state.cache_generation
    taken.cache.activate_past_recording()
    taken.feed(5)
    taken.cache.crop(-5)
    taken.cache.set_recording(False)
    assert taken.cache.state.cache_generation == state
    assert_same_future(taken, never)


def test_the_next_forward_accepts_what_waits(case: tuple[str, dict[str, Any]]) -> None:
    if "quantize" in case[1] and case[0] == "streaming_llm":
        pytest.skip("what waits is coded when it is accepted, in other blocks than while it is decoded")
    model = tiny("llama")
    taken, never = Batch(model, make(case, model)), Batch(model, make(case, model))
    for batch in (taken, never):
        batch.feed(30)
    taken.cache.activate_past_recording()
    for batch in (taken, never):
        for _ in range(4):
            batch.feed(1)
    taken.cache.layers[0].record_past = False
    assert not taken.cache.is_recording_past()
    assert_same_future(taken, never)


def test_batch_operations_move_what_waits(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    taken, never = Batch(model, make(case, model)), Batch(model, make(case, model))
    taken.cache.activate_past_recording()
    taken.feed(34)
    order = torch.tensor([2, 0, 0])
    taken.cache.reorder_cache(order)
    taken.cache.crop(-2)
    taken.cache.set_recording(False)
    never.feed(32)
    never.cache.reorder_cache(order)
    for batch in (taken, never):
        batch.ids, batch.mask = batch.ids[order], batch.mask[order]
    assert_same_future(taken, never)


def test_a_fork_while_tokens_wait(case: tuple[str, dict[str, Any]]) -> None:
    model = tiny("llama")
    taken = Batch(model, make(case, model))
    taken.cache.activate_past_recording()
    taken.feed(34)
    forked = Batch(model, taken.cache.fork())
    for batch in (taken, forked):
        batch.cache.crop(-2)
        batch.cache.set_recording(False)
    assert_same_future(taken, forked)


def test_deep_rejection_of_a_waiting_prompt_is_refused_and_can_be_repeated() -> None:
    """Held queries reach 64 tokens beyond the window."""
    model = tiny("llama")
    cache = make_cache("snapkv", model, **small_options("snapkv"))
    cache.activate_past_recording()
    with torch.no_grad():
        forward(model, prompt(100), cache)
    with pytest.raises(kv.CapacityError, match="64 tokens beyond the window"):
        cache.crop(-70)
    assert cache.get_seq_length() == 100
    cache.crop(-64)
    assert cache.get_seq_length() == 36
    cache.check_integrity()
    plain = make_cache("snapkv", model, **small_options("snapkv"))
    with torch.no_grad():
        forward(model, prompt(100)[:, :36], plain)
    assert_same_content(cache, plain)


@pytest.mark.parametrize("removed", [1, 3, 8, 20])
def test_crop_without_recording_where_nothing_was_dropped(any_case: tuple[str, dict[str, Any]], removed: int) -> None:
    name, options = any_case
    if is_lossy(name) and not can_be_neutral(name):
        pytest.skip("every token leaves a trace in what is stored")
    if "quantize" in options:
        pytest.skip("rows were quantized meanwhile: see tests/spec/test_quantized.py")
    model = tiny("llama")
    roomy = {**options, "budget": 200} if has_budget(name) else dict(options)
    if can_be_neutral(name) and (name in PRUNING or not has_budget(name)):
        roomy |= policy_class(name).neutral(200)
    if "merge_layers" in options:
        # Merged as they end, the first rows would stay: see tests/spec/test_merged_selections.py.
        roomy["merge_layers"] = {"start_layer": 0, "retention": 1.0}
    taken, never = (Batch(model, make_cache(name, model, **roomy)) for _ in range(2))
    for width in (30, 1, 1, 1, 5):
        taken.feed(width)
    if taken.cache.composition.carries_scores:
        # The queries that would be taken back are part of other rows' scores.
        with pytest.raises(kv.StaleGenerationError, match="activate_past_recording"):
            taken.cache.crop(-removed)
        return
    taken.cache.crop(-removed)
    left = 38 - removed
    for width in (30, 1, 1, 1, 5):
        width = min(width, left)
        if width:
            never.feed(width)
        left -= width
    assert_same_future(taken, never)


def test_crop_without_recording_after_a_drop_is_refused_and_changes_nothing(
    any_case: tuple[str, dict[str, Any]],
) -> None:
    case, (name, _) = any_case, any_case
    if not is_lossy(name):
        pytest.skip("nothing is ever dropped")
    model = tiny("llama")
    taken, never = Batch(model, make(case, model)), Batch(model, make(case, model))
    for batch in (taken, never):
        batch.feed(30)
        batch.feed(1)
    with pytest.raises(kv.StaleGenerationError, match=re.escape(taken.cache.composition.before_taking_back)):
        taken.cache.crop(-2)
    assert_same_future(taken, never)


def test_decode_rows_after_the_last_drop_can_be_cropped() -> None:
    """End-of-prefill policies only append in decode, so decode can be taken back up to the prompt's end."""
    model = tiny("llama")
    for name in ("random", "snapkv"):
        options = small_options(name)
        taken, never = (Batch(model, make_cache(name, model, **options)) for _ in range(2))
        for width in (30, 1, 1, 1):
            taken.feed(width)
        taken.cache.crop(-2)
        never.feed(30)
        never.feed(1)
        assert_same_future(taken, never)


@pytest.mark.parametrize("name", policies())
def test_crop_arguments(name: str) -> None:
    model, options = tiny("llama"), small_options(name) | only_budget(name)
    cache = make_cache(name, model, **options)
    with pytest.raises(kv.ConfigError, match="negative"):
        cache.crop(3)
    with pytest.raises(kv.ConfigError, match="fed"):
        cache.crop(-1)
    cache.crop(0)
    with torch.no_grad():
        forward(model, prompt(4), cache)
    cache.crop(0)
    if cache.composition.representation.kind == "merged_segments":
        # Every accepted token leaves a trace in what is stored.
        with pytest.raises(kv.StaleGenerationError, match="activate_past_recording"):
            cache.crop(-4)
        return
    cache.crop(-4)
    assert cache.get_seq_length() == 0
    assert generate(model, prompt(20), cache).tolist() == (
        generate(model, prompt(20), make_cache(name, model, **options)).tolist()
    )


@pytest.mark.allow_deprecated  # transformers' own candidate generator passes a generation_config and arguments
@pytest.mark.parametrize("kind", ["assistant", "prompt_lookup"])
def test_assisted_decoding_at_a_small_budget_bounds_the_cache(case: tuple[str, dict[str, Any]], kind: str) -> None:
    model, assistant = tiny("llama"), tiny("llama", seed=1, layers=1)
    ids = torch.cat([prompt(15), prompt(15)], dim=1)
    extra = {"assistant_model": assistant} if kind == "assistant" else {"prompt_lookup_num_tokens": 3}
    cache = make(case, model)
    out = generate(model, ids, cache, 12, **extra)
    assert out.shape[1] == 42
    cache.set_recording(False)
    cache.check_integrity()
    if has_budget(case[0]):
        # The mean over owners: policies may give one head more than another.
        rows = torch.stack([cache.stored_rows(layer) for layer in range(cache.num_layers)])
        assert float(rows.double().mean()) <= case[1]["budget"] + 12


@pytest.mark.allow_deprecated
@pytest.mark.parametrize("right", [True, False], ids=["all-right", "all-wrong"])
def test_assisted_ids_of_the_full_cache_are_greedy_ids(right: bool) -> None:
    model, assistant = tiny("llama"), tiny("llama", seed=0 if right else 1)
    plain = generate(model, prompt(30), make_cache("full", model), 12)
    assert torch.equal(generate(model, prompt(30), make_cache("full", model), 12, assistant_model=assistant), plain)


@pytest.mark.parametrize("name", ["random", "snapkv", "adakv"])
def test_accepted_guesses_are_read_as_single_steps_are_where_decode_only_appends(name: str) -> None:
    """Of a policy that acts at the end of the prompt, which was fed by itself."""
    model = tiny("llama")
    steps, helped = (make_cache(name, model, **small_options(name)) for _ in range(2))
    answer = prompt(12, seed=5)
    with torch.no_grad():
        forward(model, prompt(30), steps)
        helped.activate_past_recording()
        forward(model, prompt(30), helped)
        helped.crop(0)
        for start in range(0, 12, 3):
            wanted = torch.cat([forward(model, answer[:, at : at + 1], steps) for at in range(start, start + 3)], dim=1)
            found = forward(model, torch.cat([answer[:, start : start + 3], prompt(2, seed=6)], dim=1), helped)
            helped.crop(-2)
            torch.testing.assert_close(found[:, :3], wanted, atol=1e-5, rtol=1e-4)
    assert kept_positions(helped) == kept_positions(steps)


ENDED_BY_A_PROMPT: list[tuple[str, dict[str, Any]]] = [
    ("snapkv", {"budget": 8, "window": 3}),
    ("snapkv", {"budget": 8, "window": 3, "owner": "query_head"}),
    ("random", {"budget": 8, "window": 3, "unit": "token"}),
]
EVERY_STEP: list[tuple[str, dict[str, Any]]] = [
    ("h2o", {"budget": 8}),
    ("keyformer", {"budget": 8, "variant": "reference"}),
    ("scissorhands", {"budget": 8, "recent": 2, "history": 12}),
]
# Where every step decides, two accepted tokens are one decision and two that are fed are two.
DRAFTS = [*((case, n) for case in ENDED_BY_A_PROMPT for n in (1, 2)), *((case, 1) for case in EVERY_STEP)]


@pytest.mark.parametrize(("case", "accepted"), DRAFTS, ids=case_id)
def test_accepted_decode_tokens_end_a_held_prompt(case: Any, accepted: int) -> None:
    """As tokens that are fed one by one do."""
    model, ids = tiny("llama", layers=1), prompt(30)
    cache, fed = (make(case, model, chunked_prefill="hold") for _ in range(2))
    with torch.no_grad():
        forward(model, ids[:, :14], fed)
        cache.activate_past_recording()
        forward(model, ids[:, :14], cache)
        forward(model, ids[:, 14:18], cache)
        cache.crop(accepted - 4)
        for column in range(14, 14 + accepted):
            forward(model, ids[:, column : column + 1], fed)
    assert cache._runtime.snapshot.open_segment is None
    assert kept_positions(cache) == kept_positions(fed)
    cache.check_integrity()
    cache.set_recording(False)
    with torch.no_grad():
        last = [forward(model, ids[:, 14 + accepted : 15 + accepted], each) for each in (cache, fed)]
    torch.testing.assert_close(*last, atol=1e-5, rtol=1e-4)
    assert kept_positions(cache) == kept_positions(fed)
