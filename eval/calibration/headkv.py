"""Importances for HeadKV: what heads look at while the model reads a needle out of a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigError
from ...profiles import Profile
from ..generation import end_of_text_ids
from ..model_loading import LoadedModel
from ..prompting import PromptEncoder
from ..tasks.base import Example
from ..tasks.haystack import Haystack
from .attention import Reader
from .plan import Plan, check_model, needle_task, profile_of
from .probes import needle_positions, reasoning_scores, retrieval_scores

__all__ = ["calibrate_headkv"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Test:
    """One test: what the model answered and what every head earned, summed over its decode steps."""

    answer: str
    earned_LQ: Tensor


def calibrate_headkv(
    loaded: LoadedModel,
    haystack: Haystack,
    plan: Plan,
    *,
    say: Callable[[str], None] = lambda text: None,
    is_right: Callable[[str, Example], bool] | None = None,
) -> Profile:
    """Measure how much every head has to do with finding a needle; the mean over the tests that were answered right.

    Args:
        say: is told about every test.
        is_right: says whether an answer counts; by default the needle's value must occur in it.

    Raises:
        ConfigError: no test was answered right, or a length is too small.
        UnsupportedModelError: the family is not supported, or has a sliding window.
    """
    check_model(loaded)
    encoder, task, right = PromptEncoder(loaded.tokenizer), needle_task(haystack, plan), is_right or _contains_answer
    earned, tests = [], 0
    for example in plan.prompts(task, encoder):
        test, tests = _run(loaded, encoder, example, plan), tests + 1
        counts = right(test.answer, example)
        if counts:
            earned.append(test.earned_LQ)
        where = f"{example.coordinates['length_tokens']} tokens, depth {example.coordinates['depth_ratio']}"
        say(f"test {tests}, {where}: {'right' if counts else 'wrong'} ({test.answer.strip()!r})")
    if not earned:
        raise ConfigError(
            f"None of {tests} tests was answered right, so nothing says which heads find an answer. Give a model that "
            "finds a needle at these lengths, or shorter lengths or fewer distractors."
        )
    counted = {"tests": tests, "tests_answered_right": len(earned)}
    return profile_of("headkv", loaded, encoder, task, counted, torch.stack(earned).mean(0), plan)


def _run(loaded: LoadedModel, encoder: PromptEncoder, example: Example, plan: Plan) -> _Test:
    prompt = encoder.encode(example)
    needle, stop = needle_positions(encoder, example, prompt), end_of_text_ids(loaded.model, loaded.tokenizer)
    # The prompt's last token is the first decode step: its query generates the answer's first token.
    reader, token_ids = Reader(loaded.model, prompt.token_ids[:-1]), list(prompt.token_ids)
    earned = []
    for _ in range(plan.max_new_tokens):
        logits, attention_LQ1N = reader.feed(token_ids[-1:])
        generated = int(logits.argmax())
        if generated in stop:
            break
        earned.append(_scores(plan.probe, attention_LQ1N[:, :, 0], needle, token_ids, generated))
        token_ids.append(generated)
    answer = loaded.tokenizer.decode(token_ids[len(prompt.token_ids) :])
    nothing = torch.zeros(attention_LQ1N.shape[:2], dtype=torch.float64)
    return _Test(answer=answer, earned_LQ=torch.stack([nothing, *earned]).sum(0))


def _scores(probe: str, attention_LQN: Tensor, needle: Sequence[int], token_ids: list[int], generated: int) -> Tensor:
    if probe == "retrieval":
        return retrieval_scores(attention_LQN, needle, token_ids, generated)
    return reasoning_scores(attention_LQN, needle)


def _contains_answer(answer: str, example: Example) -> bool:
    return example.answers[0] in answer
