"""One dense prompt, run once and published into many caches.

A policy that acts at the end of a prompt leaves the prompt's own forward as it is: every layer attends densely, and
rows are dropped only then. So what each layer's attention was given is the same for every such policy and budget.
`capture_prompt` runs the model once and keeps it; `replay_prompt` hands it to a cache as the model's forward would,
without the model. What a cache then holds is what its own run would have left.

Policies that change the forward itself (those that prune hidden states, or merge tokens) cannot be replayed.

Letters: B batch rows, T tokens, Q query heads, H KV heads, D head dimension, V vocabulary.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .attach import attention_carrier, unwrap
from .backends import backend_of, registered_name, run_stock
from .cache import PolicyCache
from .compat import cache_argument, register_attention, set_implementation
from .engine import SharedEvidence, sharing
from .errors import ConfigError, UnsupportedModelError
from .frame import STEP, Reader, enter_forward, leave_forward
from .geometry import text_config
from .masks import MaskRecord

__all__ = ["CapturedPrompt", "can_replay", "capture_prompt", "replay_prompt"]

_NAME = "kvpolicy_capture"
_TOLD = ("scaling", "softcap", "s_aux", "position_bias")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layer:
    """What one layer's attention was given: positions are applied, nothing is dropped."""

    queries_BQTD: Tensor
    keys_BHTD: Tensor
    values_BHTD: Tensor
    record: MaskRecord
    # What attention was told beside them, as far as evidence asks: scale, cap, sinks.
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedPrompt:
    """A prompt's dense run.

    Attributes:
        arguments: the model call it came from, without a cache.
        layers: what every layer's attention was given.
        next_logits_BV: logits that follow the prompt.
        evidence: scores already taken of it, shared by every cache that asks the same.
    """

    arguments: dict[str, Any]
    layers: tuple[_Layer, ...]
    next_logits_BV: Tensor
    evidence: SharedEvidence = field(default_factory=SharedEvidence)


_RECORDER: ContextVar[list[_Layer] | None] = ContextVar("hf_kvpolicy_recorder", default=None)


@torch.no_grad()
def capture_prompt(
    model: Any, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
) -> CapturedPrompt:
    """Run a prompt densely, without a cache, and keep what every layer's attention was given.

    Args:
        model: a supported model, attached or not; it is left as it was.
        input_ids: int64 [B, T].
        attention_mask: [B, T] with zeros for pads, or None.
        position_ids: [B, T], for padded prompts.

    Raises:
        UnsupportedModelError: the model's attention does not go through the attention interface.
    """
    inner = unwrap(model)
    arguments: dict[str, Any] = {"input_ids": input_ids}
    given = {"attention_mask": attention_mask, "position_ids": position_ids}
    arguments |= {name: value for name, value in given.items() if value is not None}
    layers: list[_Layer] = []
    with _recording(attention_carrier(inner), layers):
        output = model(**arguments, use_cache=False, logits_to_keep=1)
    if len(layers) != int(text_config(inner.config).num_hidden_layers):
        raise UnsupportedModelError(
            f"{type(inner).__name__} ran {len(layers)} of {text_config(inner.config).num_hidden_layers} layers through "
            "the attention interface, so its prompt cannot be captured. Run it with every cache instead."
        )
    return CapturedPrompt(arguments=arguments, layers=tuple(layers), next_logits_BV=output.logits[:, -1])


def can_replay(cache: Any) -> bool:
    """Whether a cache is empty, its policy leaves a prompt's forward alone, and attention tells all of its model."""
    if not isinstance(cache, PolicyCache) or cache.is_initialized or cache.is_recording_past():
        return False
    if cache.family.attends_itself or cache.geometry.state_layers:
        return False
    return not cache.composition.changes_forward


@torch.no_grad()
def replay_prompt(cache: PolicyCache, model: Any, prompt: CapturedPrompt) -> None:
    """Publish a captured prompt into an empty cache, as the model's own forward would have.

    Raises:
        ConfigError: the cache is not empty, or its policy takes part in the forward.
    """
    if not can_replay(cache):
        raise ConfigError(
            "A captured prompt goes into an empty cache whose policy acts after attention; this one holds tokens, "
            "records drafts, prunes hidden states or merges tokens. Run the prompt through the model instead."
        )
    inner = unwrap(model)
    decoder: Any = cache.family.decoder(inner)
    enter_forward(cache)
    try:
        arguments = {**prompt.arguments, cache_argument(): cache, "use_cache": True}
        cache.begin_forward(decoder, arguments, Reader(cache=weakref.ref(cache), has_labels=False, logits_to_keep=1))
        with sharing(prompt.evidence):
            for index, layer in enumerate(prompt.layers):
                cache.update(layer.keys_BHTD, layer.values_BHTD, index)
                step = STEP.get()
                assert step is not None, "update leaves the step of its layer"
                STEP.set(None)
                attend = step.run.attend_foreign if step.foreign else step.run.attend
                attend(None, None, layer.queries_BQTD, step, layer.record, layer.arguments)
    finally:
        STEP.set(None)
        leave_forward()


@contextmanager
def _recording(model: Any, layers: list[_Layer]) -> Iterator[None]:
    before = str(model.config._attn_implementation)
    backend = backend_of(registered_name(before))
    assert backend is not None, "a registered name has a backend behind it"
    register_attention(_NAME, partial(_record, backend), partial(_mask, backend))
    token = _RECORDER.set(layers)
    try:
        if not set_implementation(model, _NAME):
            raise UnsupportedModelError(
                f"{type(model).__name__} keeps its own attention implementation, so its prompt cannot be captured."
            )
        yield
    finally:
        _RECORDER.reset(token)
        set_implementation(model, before)


def _record(
    backend: str,
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend as the model would, and note what was given."""
    layers = _RECORDER.get()
    if layers is not None:
        layers.append(
            _Layer(
                queries_BQTD=query,
                keys_BHTD=key,
                values_BHTD=value,
                record=attention_mask,
                arguments={name: kwargs[name] for name in _TOLD if kwargs.get(name) is not None},
            )
        )
    stock = attention_mask.stock_on(query.device) if isinstance(attention_mask, MaskRecord) else attention_mask
    return run_stock(backend, module, query, key, value, stock, **kwargs)


def _mask(backend: str, **arguments: Any) -> MaskRecord:
    return MaskRecord(backend, arguments)
