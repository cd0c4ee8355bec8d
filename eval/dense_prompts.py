"""The dense prefill of an example, run once for all caches that may take it."""

from __future__ import annotations

from typing import Any

import torch
from transformers import DynamicCache

from ..replay import CapturedPrompt, can_replay, capture_prompt, replay_prompt
from . import generation
from .generation import Prefilled
from .model_loading import trained_policy
from .prompting import EncodedPrompt

__all__ = ["DensePrompts"]


class DensePrompts:
    """Prompts of one example that were run densely; forgotten with it, for they are as large as a full cache and more.

    A policy that drops rows as a prompt ends reads a forward that is the same for all of them: it is run once, and what
    each layer's attention was given is published into every cache. Caches that take part in the forward, and caches of
    others, run it themselves.
    """

    def __init__(self, model: Any, *, share: bool = True) -> None:
        """Args: the model, and whether anything is shared; without it every cache runs every prompt."""
        self._model, self._share = model, share
        self._captured: dict[tuple[int, ...], tuple[CapturedPrompt, float]] = {}
        self._full: dict[EncodedPrompt, torch.Tensor] = {}

    def prefill(self, encoded: EncodedPrompt, cache: Any) -> Prefilled:
        """Feed a prompt segment by segment; the first one from the shared run where that is possible.

        `seconds` counts the dense run as if it had been made for this cache alone.
        """
        segments = encoded.segments
        if not (self._share and can_replay(cache)):
            return generation.prefill(self._model, segments, cache)
        captured, dense_s = self._dense(segments[0])
        started = generation.now(self._model)
        replay_prompt(cache, self._model, captured)
        replay_s = generation.now(self._model) - started
        rest = generation.prefill(self._model, segments[1:], cache, next_logits=captured.next_logits_BV[0])
        return Prefilled(
            cache=cache,
            next_logits=rest.next_logits,
            seconds=dense_s + replay_s + rest.seconds,
            selection_s=replay_s,
        )

    def full_log_probs(self, encoded: EncodedPrompt) -> torch.Tensor | None:
        """Natural log-probabilities [T, V] along the gold answer under the model's own, uncompressed cache.

        None for a checkpoint that was trained for other rows: an uncompressed cache reads its keys wrongly.
        """
        if trained_policy(self._model) is not None:
            return None
        if encoded not in self._full:
            cache = DynamicCache(config=self._model.config)
            prefilled = self._full_prefill(encoded, cache)
            self._full[encoded] = generation.score_answer(self._model, prefilled, encoded.answer_ids).log_probs_TV
        return self._full[encoded]

    def _full_prefill(self, encoded: EncodedPrompt, cache: DynamicCache) -> Prefilled:
        if encoded.segments[0] not in self._captured:
            return generation.prefill(self._model, encoded.segments, cache)
        captured, _ = self._dense(encoded.segments[0])
        for index, layer in enumerate(captured.layers):
            cache.update(layer.keys_BHTD, layer.values_BHTD, index)
        logits = captured.next_logits_BV[0]
        return generation.prefill(self._model, encoded.segments[1:], cache, next_logits=logits)

    def _dense(self, token_ids: tuple[int, ...]) -> tuple[CapturedPrompt, float]:
        if token_ids not in self._captured:
            started = generation.now(self._model)
            captured = capture_prompt(self._model, torch.tensor([token_ids], device=self._model.device))
            self._captured[token_ids] = captured, generation.now(self._model) - started
        return self._captured[token_ids]
