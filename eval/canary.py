"""The canary: one needle in a short text, asked with the full cache before the first cell of a run.

A checkpoint that was trained for a policy has no full cache: that policy is asked instead, and the record names it.

A model that does not answer is a finding: the run goes on, and its record and its report say what its scores are worth.
Logits that are no numbers, or a cache without rows, are faults of what runs the model, and end the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..errors import IntegrityError
from .cells import Cell
from .dense_prompts import DensePrompts
from .engine import CacheBuilder
from .model_loading import LoadedModel
from .outcomes import status_of_error
from .prompt_ids import check_prompt_ids
from .prompting import PromptEncoder
from .tasks.base import Example
from .tasks.haystack import noise
from .trial import Trial, run_trial

__all__ = ["canary_note", "canary_warning", "run_canary"]

_METRIC, _NEW_TOKENS = "needle_match", 12
_CODE, _ASKED = "4839201", "The access code for green-lantern is"
_FILLER = noise().take(0, 12)
# One text for every model: what it answers may be compared between runs.
_EXAMPLE = Example(
    context="\n\n".join(
        (
            "An access code is hidden in the text below. Remember it; you will be asked for it later.",
            " ".join([*_FILLER[:6], f"{_ASKED} {_CODE}.", *_FILLER[6:]]),
        )
    ),
    question="What is the access code for green-lantern given in the text above?",
    answer_prefix=_ASKED,
    answers=(_CODE,),
)


def run_canary(
    loaded: LoadedModel, encoder: PromptEncoder, build_cache: CacheBuilder, *, share: bool
) -> dict[str, Any]:
    """Ask for the needle and return what is kept of it, as plain JSON.

    Args:
        loaded: model and tokenizer.
        encoder: makes the prompt.
        build_cache: builds the full cache, or that of the policy the checkpoint was trained for.
        share: whether the prompt is run as the cells' shared ones are.

    `answered` is None where the prompt could not be run, with the reason; the cells fail in the same way, and say so.

    Raises:
        ConfigError: the prompt has a token that its text does not have.
        IntegrityError: logits that are no numbers, or a cache without rows after the prompt.
    """
    encoded = encoder.encode(_EXAMPLE)
    check_prompt_ids(loaded.tokenizer, _EXAMPLE, encoded)
    tokens = len(encoded.token_ids)
    policy = loaded.trained_policy or "full"
    found = {"policy": policy, "prompt_tokens": tokens, "prompt_sha256": encoded.sha256, "expected": _CODE}
    cell = Cell(task="canary", length_tokens=tokens, policy=policy, budget=None, max_new_tokens=_NEW_TOKENS)
    try:
        dense = DensePrompts(loaded.model, share=share)
        cache = build_cache(cell)
        trial = run_trial(loaded, cell, _EXAMPLE, encoded, cache, metric=_METRIC, dense=dense, beside=encoded)
    except Exception as error:  # what cannot be run is told of every cell, each with its outcome
        return {**found, "answered": None, "reason": f"{status_of_error(error)} ({error})"[:500]}
    _check_is_sound(trial)
    return {
        **found,
        "answered": trial.quality.score == 1.0,
        "output_text": trial.quality.output_text,
        "answer_nll": trial.quality.answer_nll,
        "kl_to_full_nats": trial.quality.kl_to_full_nats,
        "prompt_rows_mean": trial.cache.prompt_rows_mean,
    }


def canary_note(canary: Mapping[str, Any]) -> str:
    """What was asked and answered, and where the answer is wrong what that says of the run."""
    told = _told(canary)
    if canary["answered"] is False:
        told += (
            " The model does not find a needle in a short text: low scores of questions then say nothing of a policy."
        )
    return told


def canary_warning(canary: Mapping[str, Any]) -> str | None:
    """The note, unless the answer is right."""
    return None if canary["answered"] else canary_note(canary)


def _told(canary: Mapping[str, Any]) -> str:
    if canary["answered"] is None:
        return f"Canary: a prompt of {canary['prompt_tokens']} tokens cannot be run: {canary['reason']}."
    # Records of before checkpoints were asked with their own policy name none.
    policy = canary.get("policy", "full")
    who = "the full cache" if policy == "full" else f"{policy}, which the checkpoint was trained for,"
    return (
        f"Canary: asked for {canary['expected']}, hidden in {canary['prompt_tokens']} tokens, {who} answers "
        f"{canary['output_text'].strip()!r}: {'right' if canary['answered'] else 'wrong'}."
    )


def _check_is_sound(trial: Trial) -> None:
    """Refuse what no cell of the run could be measured with.

    The likelihood is read from the logits after the prompt and after every token of the answer: it is a number only if
    they are.
    """
    if trial.cache.prompt_rows_min < 1:
        raise IntegrityError(
            "The canary left a cache with a layer or head without rows: the model does not write into the cache "
            "it is given. Nothing was run; check that the model's attention goes through the library."
        )
    if not math.isfinite(trial.quality.answer_nll):
        raise IntegrityError(
            f"The canary's logits are no finite numbers (answer NLL {trial.quality.answer_nll}): the model, its dtype "
            "or its attention is broken. Nothing was run; try dtype float32 or bfloat16."
        )
