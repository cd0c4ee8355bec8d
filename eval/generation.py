"""One prompt through a model with a given cache: prefill, greedy decoding, and the NLL of a given answer.

Every forward goes through the model itself rather than `generate`, so that the tokens that a cache is fed are
known one by one and the same code serves scoring and decoding.
"""

from __future__ import annotations

import copy
import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..compat import cache_argument

__all__ = [
    "AnswerScore",
    "Generated",
    "Prefilled",
    "end_of_text_ids",
    "fork",
    "greedy_decode",
    "now",
    "prefill",
    "score_answer",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefilled:
    """A cache that holds a prompt, and the logits `[V]` that follow it.

    `selection_s` is the part of `seconds` in which a prompt that was run before was published into the cache: scores,
    selection and packing. None where the cache ran the prompt itself.
    """

    cache: Any
    next_logits: torch.Tensor
    seconds: float
    selection_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Greedy continuation, the end token left out. `finish_reason` is "eos", "stop", "length" or "none" (not asked)."""

    token_ids: tuple[int, ...]
    finish_reason: str
    forwards: int
    ms_per_forward: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerScore:
    """Mean negative log-likelihood (nats per token) of a given answer, and how often it was the argmax.

    `log_probs_TV` are the distributions it was read from, fp32, one row a token.
    """

    nll_per_token: float
    top1_rate: float
    tokens: int
    log_probs_TV: torch.Tensor
    ms_per_forward: float


@torch.no_grad()
def prefill(
    model: Any, segments: Iterable[Sequence[int]], cache: Any, *, next_logits: torch.Tensor | None = None
) -> Prefilled:
    """Feed a prompt, one forward a segment; a cache may select after each.

    `next_logits` [V] follow what the cache holds already, for a prompt that has no segment left.
    """
    started, logits = now(model), next_logits
    with warnings.catch_warnings():
        # Here it is no mistake: a cache is to select before it has seen the question.
        warnings.filterwarnings("ignore", message=".*two prompt segments follow one another")
        for token_ids in segments:
            logits = _forward(model, token_ids, cache)
    assert logits is not None, "a prompt has a segment"
    if hasattr(cache, "finish_prefill"):
        cache.finish_prefill()  # a cache that waits for more chunks is told that there are none
    return Prefilled(cache=cache, next_logits=logits, seconds=now(model) - started)


@torch.no_grad()
def greedy_decode(
    model: Any,
    prefilled: Prefilled,
    max_new_tokens: int,
    stop_ids: frozenset[int],
    *,
    min_new_tokens: int = 0,
    is_complete: Callable[[list[int]], bool] = lambda tokens: False,
    token_fed: Callable[[], None] = lambda: None,
) -> Generated:
    """Continue greedily until a stop token, an answer that is complete, or `max_new_tokens`.

    Args:
        model: the model.
        prefilled: what follows which prompt; its cache is fed the answer.
        max_new_tokens: tokens of the longest answer.
        stop_ids: ids that end an answer; they are no part of it.
        min_new_tokens: until there are so many, stop tokens are passed over for the next best token.
        is_complete: asked after each token whether the answer ends with it, such as by a stop string.
        token_fed: called after each forward.
    """
    tokens: list[int] = []
    logits, forwards, started = prefilled.next_logits, 0, now(model)
    reason = "length"
    while True:
        if len(tokens) < min_new_tokens:
            logits = logits.index_fill(0, torch.tensor(sorted(stop_ids), device=logits.device), -math.inf)
        token = int(logits.argmax())
        if token in stop_ids:
            reason = "eos"
            break
        tokens.append(token)
        if is_complete(tokens):
            reason = "stop"
            break
        if len(tokens) == max_new_tokens:
            break
        logits = _forward(model, [token], prefilled.cache)
        token_fed()
        forwards += 1
    elapsed_ms = 1000.0 * (now(model) - started)
    return Generated(
        token_ids=tuple(tokens),
        finish_reason=reason,
        forwards=forwards,
        ms_per_forward=elapsed_ms / forwards if forwards else 0.0,
    )


@torch.no_grad()
def score_answer(
    model: Any, prefilled: Prefilled, answer_ids: Sequence[int], *, token_fed: Callable[[], None] = lambda: None
) -> AnswerScore:
    """Likelihood of the answer, one token a forward; `token_fed` is called after each.

    Feeding it at once would be a prompt segment to a policy, which then selects differently from decoding.
    """
    started = now(model)
    followed = [prefilled.next_logits]
    for token in answer_ids[:-1]:
        followed.append(_forward(model, [token], prefilled.cache))
        token_fed()
    elapsed_ms, forwards = 1000.0 * (now(model) - started), len(answer_ids) - 1
    log_probs_TV = torch.log_softmax(torch.stack(followed).float(), dim=-1)
    gold_T = torch.tensor(list(answer_ids), device=log_probs_TV.device)
    return AnswerScore(
        nll_per_token=-float(log_probs_TV.gather(1, gold_T[:, None]).double().mean()),
        top1_rate=float((log_probs_TV.argmax(-1) == gold_T).double().mean()),
        tokens=len(answer_ids),
        log_probs_TV=log_probs_TV,
        ms_per_forward=elapsed_ms / forwards if forwards else 0.0,
    )


def fork(prefilled: Prefilled) -> Prefilled:
    """An independent copy of the state after the prompt."""
    cache = prefilled.cache
    twin = cache.fork() if hasattr(cache, "fork") else copy.deepcopy(cache)
    return Prefilled(cache=twin, next_logits=prefilled.next_logits, seconds=0.0)


def end_of_text_ids(model: Any, tokenizer: Any) -> frozenset[int]:
    """Every id that ends an answer: chat models name some in the generation config, some in the tokenizer."""
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    found = configured if isinstance(configured, list) else [configured]
    return frozenset(int(i) for i in [*found, tokenizer.eos_token_id] if i is not None)


def _forward(model: Any, token_ids: Sequence[int], cache: Any) -> torch.Tensor:
    """One forward of a single sequence; returns the logits `[V]` after its last token."""
    input_ids = torch.tensor([list(token_ids)], device=model.device)
    keywords: dict[str, Any] = {cache_argument(): cache, "use_cache": True}
    # Logits of a whole prompt would be the largest tensor of the run.
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        keywords["logits_to_keep"] = 1
    logits: torch.Tensor = model(input_ids=input_ids, **keywords).logits
    return logits[0, -1]


def now(model: Any) -> float:
    """Seconds of a clock that has waited for what the model's device still runs."""
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
