"""Decode and prefill time of policies against transformers' own cache, in interleaved rounds.

Every round runs each contender once, in an order that rotates, and ratios are taken within a round: a slow
moment of the machine then hits both sides. The reported ratio is the median over rounds; "total" is the ratio
of the summed times, which also counts what happens only now and then, such as a buffer that grows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .models import (
    EVERY_POLICY,
    POLICIES,
    PRUNING_POLICIES,
    RAGGED,
    UNBUDGETED,
    batch_ids,
    forward,
    new_cache,
    stored_rows,
)
from .report import Measure

# Decode that takes evidence from every step does more work than decode that does not.
DECODE_TARGETS = {"h2o": 1.15, "scissorhands": 1.15, "keyformer": 1.30}
DECODE_TARGET = 1.05
# Of decode with rows stored ragged over snapkv with as many, by batch size.
RAGGED_TARGETS = {1: 1.10, 4: 1.25}
# Policies that are not named score a whole prompt and have no target of their own.
PREFILL_TARGETS = {"streaming_llm": 1.03, "sliding_window": 1.03, "snapkv": 1.08, "random": 1.08, "h2o": 1.6}
PREFILL_TARGETS |= {"adakv": 1.10, "pyramidkv": 1.10, "headkv": 1.10, "pyramidinfer": 0.9}
BLOCK_TOKENS = 8


@dataclass(frozen=True)
class Contender:
    """`prepare` runs off the clock and returns what the clock runs."""

    name: str
    prepare: Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Case:
    batch: int
    context: int
    rows: int


def interleaved(
    contenders: list[Contender], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """Seconds per contender and round; one more round runs first and is not counted."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for number in range(rounds + 1):
        turn = number % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            work = contender.prepare()
            begin = clock()
            work()
            if number:
                seconds[contender.name].append(clock() - begin)
    return seconds


def _ratio(seconds: list[float], baseline: list[float], scale: float) -> tuple[float, dict[str, Any]]:
    ratios = [a / b for a, b in zip(seconds, baseline, strict=True)]
    quarters = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
    details = {
        "ms": statistics.median(seconds) * scale, "stock ms": statistics.median(baseline) * scale,
        "quartiles": f"{quarters[0]:.3f}-{quarters[2]:.3f}", "total": sum(seconds) / sum(baseline),
        "rounds": len(ratios), "ratios": ratios,
    }  # fmt: skip
    return statistics.median(ratios), details


def _decode_block(model: Any, cache: Any, ids: torch.Tensor) -> None:
    for step in range(BLOCK_TOKENS):
        forward(model, ids[:, step : step + 1], cache)


def cropped_contender(name: str, model: Any, cache: Any, ids: torch.Tensor) -> Contender:
    """Decodes a block from where the cache is; cropping it before the next one puts every block at the same length."""
    used = False

    def prepare() -> Callable[[], None]:
        nonlocal used
        if used:
            cache.crop(-BLOCK_TOKENS)
        used = True
        return lambda: _decode_block(model, cache, ids)

    return Contender(name, prepare)


def _stock_contender(name: str, stock: Any, ids: torch.Tensor, first_row_count: int) -> Contender:
    cache = new_cache(None, stock, 0)
    forward(stock, ids[:, :first_row_count], cache)
    return cropped_contender(name, stock, cache, ids)


def _policy_contender(policy: str, model: Any, ids: torch.Tensor, case: Case) -> tuple[Contender, bool]:
    """The contender, and whether the policy appends decode rows (it then starts every block from a fork)."""
    cache = new_cache(policy, model, case.rows)
    forward(model, ids[:, : case.context], cache)
    layers = model.config.get_text_config().num_hidden_layers
    probe = cache.fork()
    _decode_block(model, probe, ids)
    grows = stored_rows(probe, layers) > case.rows

    def prepare() -> Callable[[], None]:
        running = cache.fork() if grows else cache
        return lambda: _decode_block(model, running, ids)

    return Contender(policy, prepare), grows


def decode_measures(
    model: Any, stock: Any, filler: list[int], case: Case, rounds: int, chosen: Container[str] = POLICIES
) -> Iterator[Measure]:
    """ms/token of each policy that holds `rows` rows over transformers' own cache that holds as many."""
    # Ragged rows are compared with snapkv's.
    against = {"snapkv"} if any(policy in chosen for policy in RAGGED) else set()
    policies = [policy for policy in POLICIES if policy in chosen or policy in against]
    ids = batch_ids(filler, case.batch, case.context, model.device)
    # A cache that does not grow is compared with one whose mean length over a block is the same.
    contenders = [
        _stock_contender("stock, constant", stock, ids, case.rows - BLOCK_TOKENS // 2),
        _stock_contender("stock, growing", stock, ids, case.rows),
    ]
    baseline: dict[str, str] = {}
    for policy in policies:
        contender, grows = _policy_contender(policy, model, ids, case)
        contenders.append(contender)
        baseline[policy] = contenders[1 if grows else 0].name
    seconds = interleaved(contenders, rounds)
    for policy in policies:
        value, details = _ratio(seconds[policy], seconds[baseline[policy]], 1e3 / BLOCK_TOKENS)
        name = f"{policy}, {case.rows} rows, context {case.context}, batch {case.batch}"
        target = None if policy in RAGGED else DECODE_TARGETS.get(policy, DECODE_TARGET)
        yield Measure("decode ms/token", name, value, "<=", target, details)
    for policy in filter(policies.__contains__, RAGGED):
        value, details = _ratio(seconds[policy], seconds["snapkv"], 1e3 / BLOCK_TOKENS)
        name = f"{policy}, {case.rows} rows in the mean, context {case.context}, batch {case.batch}"
        target = RAGGED_TARGETS.get(case.batch)
        yield Measure("decode ms/token over snapkv", name, value, "<=", target, details)


def unbudgeted_measures(model: Any, filler: list[int], batch: int, context: int, rounds: int) -> Iterator[Measure]:
    """ms/token of a policy that takes the rows it needs over snapkv with a budget of as many."""
    ids, layers = batch_ids(filler, batch, context, model.device), model.config.get_text_config().num_hidden_layers
    for policy in UNBUDGETED:
        probe = new_cache(policy, model, 0)
        forward(model, ids, probe)
        rows = round(stored_rows(probe, layers))
        del probe
        case = Case(batch, context, rows)
        contenders = [_policy_contender(name, model, ids, case)[0] for name in ("snapkv", policy)]
        seconds = interleaved(contenders, rounds)
        value, details = _ratio(seconds[policy], seconds["snapkv"], 1e3 / BLOCK_TOKENS)
        name = f"{policy}, {rows} rows in the mean as it chose, context {context}, batch {batch}"
        yield Measure("decode ms/token over snapkv", name, value, "<=", RAGGED_TARGETS.get(batch), details)


def prefill_measures(
    model: Any, stock: Any, filler: list[int], case: Case, rounds: int, chosen: Container[str] = EVERY_POLICY
) -> Iterator[Measure]:
    """Prefill time of each policy over transformers' own cache."""
    ids = batch_ids(filler, case.batch, case.context, model.device)

    def contender(policy: str | None) -> Contender:
        runner = stock if policy is None else model

        def prepare() -> Callable[[], None]:
            cache = new_cache(policy, runner, case.rows)
            return lambda: forward(runner, ids, cache)

        return Contender(policy or "stock", prepare)

    policies = [policy for policy in EVERY_POLICY if policy in chosen]
    seconds = interleaved([contender(policy) for policy in (None, *policies)], rounds)
    for policy in policies:
        value, details = _ratio(seconds[policy], seconds["stock"], 1e3)
        rows = "defaults" if policy in (*UNBUDGETED, *PRUNING_POLICIES) else f"{case.rows} rows"
        name = f"{policy}, {rows}, context {case.context}, batch {case.batch}"
        yield Measure("prefill", name, value, "<=", PREFILL_TARGETS.get(policy), details)
