"""One example under one cell: prefill once, score the gold answer on a fork, decode, measure the cache."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..errors import ConfigError
from . import acting, engine, generation
from .cells import Cell
from .dense_prompts import DensePrompts
from .engine import CacheUse, RowsOverTime
from .feasible import positions_of
from .generation import AnswerScore, Generated, Prefilled
from .metrics.agreement import agreement
from .metrics.registry import score_answer
from .model_loading import LoadedModel
from .prompting import EncodedPrompt
from .records import CacheRecord, QualityRecord, TimingRecord
from .tasks.base import LIKELIHOOD, Example

__all__ = ["Trial", "run_trial"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Everything measured on one example; `did_not_act` says why the policy cannot have worked, if so."""

    quality: QualityRecord
    cache: CacheRecord
    timing: TimingRecord
    did_not_act: str | None


def run_trial(
    loaded: LoadedModel,
    cell: Cell,
    example: Example,
    encoded: EncodedPrompt,
    cache: Any,
    *,
    metric: str,
    dense: DensePrompts,
    beside: EncodedPrompt,
) -> Trial:
    """Run one example with a fresh `cache`; `metric` names how its answer is scored, `dense` runs its prompt.

    `beside` is the prompt that the full cache is compared on: the same one, unless this one lacks its text.

    Where nothing is generated, the cache itself is fed the gold text, and `final_*` are measured after it.

    Raises:
        ConfigError: the prompt is empty, or longer than the model's positions.
        KVPolicyError: whatever the cache refuses.
    """
    model = loaded.model
    if not encoded.token_ids:
        raise ConfigError(f"The prompt of example {example.example_id} has no token. Give it a context or a question.")
    _check_fits(model, len(encoded.token_ids) + max(cell.max_new_tokens, len(encoded.answer_ids)))
    prefilled = dense.prefill(encoded, cache)
    after_prompt = engine.measure(prefilled.cache)
    held = RowsOverTime(prefilled.cache, after_prompt)
    if cell.max_new_tokens:
        answer = generation.score_answer(model, generation.fork(prefilled), encoded.answer_ids)
        generated = _generated(loaded, cell, example, prefilled, held)
    else:
        answer = generation.score_answer(model, prefilled, encoded.answer_ids, token_fed=held.token_fed)
        # Nothing is generated: the decode steps are those that fed the gold text.
        generated = Generated(token_ids=(), finish_reason="none", forwards=0, ms_per_forward=answer.ms_per_forward)
    at_end = engine.measure(prefilled.cache)
    prompt_tokens = len(encoded.token_ids)
    allowed = engine.budget_rows(cell, prefilled.cache, model, prompt_tokens)
    full_bytes = engine.full_kv_bytes(model, prompt_tokens)
    return Trial(
        quality=_quality(loaded, example, answer, generated, metric, dense.full_log_probs(beside)),
        cache=_cache_record(
            prefilled.cache,
            after_prompt,
            at_end,
            rows_over_time_mean=held.mean,
            prompt_tokens=prompt_tokens,
            full_kv_bytes=full_bytes,
            allowed_rows=allowed,
            binds=acting.budget_binds(cell, allowed, prompt_tokens),
        ),
        timing=TimingRecord(
            prefill_s=prefilled.seconds,
            decode_ms_per_token=generated.ms_per_forward,
            selection_s=prefilled.selection_s,
        ),
        did_not_act=acting.why_not_acting(cell, allowed, prompt_tokens, after_prompt, at_end, full_kv_bytes=full_bytes),
    )


def _generated(
    loaded: LoadedModel, cell: Cell, example: Example, prefilled: Prefilled, held: RowsOverTime
) -> Generated:
    return generation.greedy_decode(
        loaded.model,
        prefilled,
        cell.max_new_tokens,
        generation.end_of_text_ids(loaded.model, loaded.tokenizer) | _stop_token_ids(loaded.tokenizer, example),
        min_new_tokens=example.min_new_tokens,
        is_complete=_stops(loaded.tokenizer, example),
        token_fed=held.token_fed,
    )


def _check_fits(model: Any, tokens: int) -> None:
    limit = positions_of(model.config)
    if limit is not None and tokens > limit:
        raise ConfigError(
            f"The prompt and its answer take {tokens} tokens, the model has positions for {limit}. "
            "Ask for a shorter length."
        )


def _stop_token_ids(tokenizer: Any, example: Example) -> frozenset[int]:
    """Ids of the stop strings that are one token: as an end token, such a one is passed over at the beginning."""
    last = [(stop, tokenizer(stop, add_special_tokens=False)["input_ids"][-1]) for stop in example.stop]
    # A tokenizer may put a token for the beginning of a text in front.
    return frozenset(token for stop, token in last if tokenizer.decode([token]) == stop)


def _stops(tokenizer: Any, example: Example) -> Callable[[list[int]], bool]:
    """Whether the tokens so far contain a string that ends an answer, once they are as many as are asked for."""
    if not example.stop:
        return lambda tokens: False

    def complete(tokens: list[int]) -> bool:
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        return len(tokens) > example.min_new_tokens and any(stop in text for stop in example.stop)

    return complete


def _quality(
    loaded: LoadedModel,
    example: Example,
    answer: AnswerScore,
    generated: Generated,
    metric: str,
    full_log_probs_TV: Tensor | None,
) -> QualityRecord:
    text = loaded.tokenizer.decode(generated.token_ids, skip_special_tokens=True)
    # A tokenizer may split an answer otherwise behind another text; then no two positions mean the same.
    beside_full = None
    if full_log_probs_TV is not None and full_log_probs_TV.shape == answer.log_probs_TV.shape:
        beside_full = agreement(full_log_probs_TV, answer.log_probs_TV)
    return QualityRecord(
        score=math.exp(-answer.nll_per_token) if metric == LIKELIHOOD else score_answer(metric, text, example),
        answer_nll=answer.nll_per_token,
        answer_top1_rate=answer.top1_rate,
        answer_tokens=answer.tokens,
        output_text=text,
        output_tokens=len(generated.token_ids),
        finish_reason=generated.finish_reason,
        kl_to_full_nats=beside_full.kl_nats if beside_full else None,
        top1_agreement_ratio=beside_full.top1_ratio if beside_full else None,
    )


def _cache_record(
    cache: Any,
    after_prompt: CacheUse,
    at_end: CacheUse,
    *,
    rows_over_time_mean: float,
    prompt_tokens: int,
    full_kv_bytes: int,
    allowed_rows: int | None,
    binds: bool,
) -> CacheRecord:
    return CacheRecord(
        prompt_rows_mean=after_prompt.rows_mean,
        prompt_rows_min=after_prompt.rows_min,
        prompt_rows_max=after_prompt.rows_max,
        final_rows_mean=at_end.rows_mean,
        final_rows_max=at_end.rows_max,
        rows_over_time_mean=rows_over_time_mean,
        kept_ratio=after_prompt.rows_mean / prompt_tokens,
        measured_bytes=after_prompt.measured_bytes,
        payload_bytes=after_prompt.payload_bytes,
        slack_bytes=after_prompt.slack_bytes,
        transient_peak_bytes=at_end.transient_peak_bytes,
        full_kv_bytes=full_kv_bytes,
        budget_rows=allowed_rows,
        budget_binds=binds,
        selections=at_end.statistics["selections"],
        rows_dropped=at_end.statistics["rows_dropped"],
        forwards=at_end.statistics["forwards"],
        publications=at_end.statistics["publications"],
        manifest_sha256=str(cache.manifest.sha256),
    )
