"""What can be cut short: a state, the act that is interrupted, and the probe that must not notice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from helpers import (
    PRUNING,
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

from hf_kvpolicy.config import policy_options
from hf_kvpolicy.contract import Phase

Case = tuple[str, dict[str, Any]]
Act = Callable[[Any, Any], Tensor | None]


def _is_double(name: str, options: dict[str, Any]) -> bool:
    """Policies that choose by position alone do the same under every unit."""
    return name in ("sliding_window", "streaming_llm") and options.get("unit", "token") != "token"


STORED_OTHERWISE = [
    case for case in stored_otherwise() if case[0] in ("snapkv", "h2o", "streaming_llm", "fastgen", "pyramidinfer")
]
CASES: list[Case] = [("full", {}), *(case for case in policy_units() if not _is_double(*case)), *STORED_OTHERWISE]
CHUNKED: list[Case] = [
    (name, {**options, "chunked_prefill": "hold"})
    for name, options in CASES
    if "chunked_prefill" in policy_options(name) and options.get("unit", "head") != "layer" and name not in PRUNING
]


@dataclass(frozen=True)
class Scenario:
    """`prepare` brings an empty cache into the state, `act` is what gets interrupted."""

    name: str
    prepare: Callable[[Any, Any], None]
    act: Act
    held: bool = False


def padded_prompt(model: Any, cache: Any) -> Tensor:
    """Feed two prompts of unequal length."""
    ids, mask = left_padded([prompt(13, 1), prompt(8, 2)])
    return forward(model, ids, cache, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0))


def feed(model: Any, cache: Any, length: int, seed: int) -> Tensor:
    """Feed the same number of new tokens to both rows."""
    columns, frontier = cache.get_seq_length(), _frontier(cache)
    mask = torch.ones((2, columns + length), dtype=torch.long)
    seen = frontier.seen_BF
    if seen is not None:
        mask[:, :columns] = seen.long()
    positions = torch.tensor(frontier.tokens)[:, None] + torch.arange(length)
    return forward(model, prompt(length, seed, 2), cache, attention_mask=mask, position_ids=positions)


def _frontier(cache: Any) -> Any:
    runtime = cache._runtime
    return (runtime.snapshot if runtime.waiting is None else runtime.waiting.snapshot).frontier


def _decoded(model: Any, cache: Any) -> None:
    padded_prompt(model, cache)
    feed(model, cache, 1, 11)


def _recorded(model: Any, cache: Any) -> None:
    cache.activate_past_recording()
    padded_prompt(model, cache)
    feed(model, cache, 3, 12)


def _recorded_prompt(model: Any, cache: Any) -> None:
    cache.activate_past_recording()
    padded_prompt(model, cache)


SCENARIOS = [
    Scenario("prefill", lambda model, cache: None, padded_prompt),
    Scenario("decode", _decoded, lambda model, cache: feed(model, cache, 1, 21)),
    Scenario("second_turn", _decoded, lambda model, cache: feed(model, cache, 5, 22)),
    Scenario("held_chunk", padded_prompt, lambda model, cache: feed(model, cache, 4, 23), held=True),
    Scenario("end_of_held_prompt", padded_prompt, lambda model, cache: feed(model, cache, 1, 24), held=True),
    Scenario("finish_prefill", padded_prompt, lambda model, cache: cache.finish_prefill(), held=True),
    Scenario("recorded_forward", _recorded_prompt, lambda model, cache: feed(model, cache, 3, 25)),
    Scenario("accept_prompt", _recorded_prompt, lambda model, cache: cache.crop(-2)),
    Scenario("accept_some", _recorded, lambda model, cache: cache.crop(-1)),
    Scenario("accept_by_forward", _recorded, lambda model, cache: feed(model, cache, 1, 26)),
    Scenario("stop_recording", _recorded, lambda model, cache: cache.set_recording(False)),
    Scenario("reorder", _decoded, lambda model, cache: cache.reorder_cache(torch.tensor([1, 1]))),
    Scenario("reorder_waiting", _recorded, lambda model, cache: cache.reorder_cache(torch.tensor([1, 0]))),
]


def pairs() -> Iterator[tuple[Case, Scenario]]:
    """Return every policy with every scenario that it can be in."""
    for scenario in SCENARIOS:
        for case in CHUNKED if scenario.held else CASES:
            if case[0] not in PRUNING or scenario.prepare not in (_recorded, _recorded_prompt):
                yield case, scenario


def pair_id(value: Any) -> str:
    """Name a parameter of the tests."""
    if isinstance(value, Scenario):
        return value.name
    name, options = value
    default = small_options(name)
    shown = ((k, v) for k, v in options.items() if v is not None and k not in default)
    return "-".join([name, *("merged" if k == "merge_layers" else str(v) for k, v in shown)])


def prepared(case: Case, scenario: Scenario) -> tuple[Any, Any]:
    """Return (attached model, cache in the scenario's state)."""
    model = tiny("llama")
    cache = make_cache(case[0], model, **case[1])
    scenario.prepare(model, cache)
    return model, cache


def probe(model: Any, cache: Any) -> Tensor:
    """Return the logits of one more token, on a fork."""
    return feed(model, cache.fork(), 1, 99)[:, -1]


def watched(cache: Any, act: Callable[[], Any]) -> tuple[Any, list[tuple[int, Phase]]]:
    """Run an act and return what it returned and every phase it announced."""
    events: list[tuple[int, Phase]] = []
    cache._runtime.observer = lambda layer, phase: events.append((layer, phase))
    try:
        return act(), events
    finally:
        cache._runtime.observer = None


def facts(cache: Any) -> dict[str, Any]:
    """Return everything that a failure must leave as it is."""
    snapshot = cache._runtime.snapshot
    rows = range(snapshot.batch_size)
    return {
        "columns": cache.get_seq_length(),
        "generations": snapshot.generations,
        "frontier": snapshot.frontier.columns,
        "positions": [[t.tolist() for b in rows for t in cache.positions(i, b)] for i in range(cache.num_layers)],
        "publications": cache.statistics.publications,
        "dropped": cache.statistics.rows_dropped,
    }
