"""Layers on several devices: every layer's rows lie where it computes, and nothing else changes.

The devices are pretended (`tests/pretended.py`), so that what one forward mixes up fails without the hardware.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families._models import model_of
from helpers import (
    CACHE,
    FULL,
    PRUNING,
    assert_same_content,
    case_id,
    forward,
    left_padded,
    make_cache,
    options_for,
    policies,
    policy_units,
    prompt,
    small_options,
    stored_otherwise,
)
from pretended import HOST, PretendedDevices, device_of, pretended, put

import hf_kvpolicy as kv

Case = tuple[str, dict[str, Any]]
# Of the decoder's input and output, and of each layer: none lies with the input, and neighbours lie apart.
ENDS, LAYERS = pretended(1), (pretended(2), pretended(3), pretended(2), pretended(3))

# Every policy; in full runs with all its units, owners and positions.
CASES = [*(policy_units() if FULL else [(name, small_options(name)) for name in policies()]), *stored_otherwise()]
# One policy of each kind of forward, of those that can be recorded.
_KINDS = ("full", "snapkv", "streaming_llm", "h2o", "adakv", "fastgen", "minicache", "dmc", "layer_condensed")
OPERATED = [case for case in CASES if case[0] not in PRUNING and (FULL or case[0] in _KINDS)]


def spread(model: Any) -> Any:
    """Put a model's layers on several devices, with hooks that carry their inputs there as accelerate's do."""
    put(model, ENDS)
    decoder = model.model
    for layer, device in zip(decoder.layers, LAYERS, strict=True):
        put(layer, device)
        layer.register_forward_pre_hook(_carrying(device), with_kwargs=True)
    decoder.norm.register_forward_pre_hook(_carrying(ENDS), with_kwargs=True)
    return model


def _carrying(device: torch.device) -> Any:
    def carry(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        sent = {name: given if name == CACHE else _sent(given, device) for name, given in kwargs.items()}
        return _sent(args, device), sent

    return carry


def _sent(value: Any, device: torch.device) -> Any:
    if isinstance(value, tuple):
        return tuple(_sent(one, device) for one in value)
    if isinstance(value, dict):
        return {name: _sent(one, device) for name, one in value.items()}
    return value.to(device) if isinstance(value, torch.Tensor) else value


class Fed:
    """A model, its cache, and what they have been fed: a left-padded batch on one device."""

    def __init__(self, model: Any, case: Case, device: torch.device) -> None:
        self.model, self.device = model, device
        self.cache = make_cache(case[0], model, **options_for(model, *case))
        self.mask = torch.zeros((2, 0), dtype=torch.long)
        self.logits: list[torch.Tensor] = []

    def feed(self, *lengths: int) -> None:
        """Run a forward of so many tokens for each number; the first one ever is padded."""
        for length in lengths:
            fed = self.mask.shape[1]
            ids, mask = prompt(length, seed=fed, rows=2), torch.ones((2, length), dtype=torch.long)
            if not fed:
                ids, mask = left_padded([prompt(length - 7, seed=1), prompt(length, seed=2)])
            self.mask = torch.cat([self.mask, mask], dim=1)
            positions = (self.mask.cumsum(-1) - 1).clamp(min=0)[:, fed:]
            given = {"attention_mask": self.mask.to(self.device), "position_ids": positions.to(self.device)}
            with torch.no_grad():
                logits = forward(self.model, ids.to(self.device), self.cache, **given)
            self.logits.append(logits[:, -1].to(HOST))


def both(case: Case, live: Callable[[Fed], None], family: str = "llama", **options: Any) -> None:
    """Lead one life on several devices and one without; they must not differ."""
    model, plain = (model_of(family, layers=len(LAYERS), **options) for _ in range(2))
    alone = Fed(plain, case, HOST)
    live(alone)
    with PretendedDevices():
        apart = Fed(spread(model), case, ENDS)
        live(apart)
        assert_placed(apart.cache)
        apart.cache.check_integrity()
        assert apart.cache.receipt.successor == apart.cache.state.generations
        assert all(apart.cache.source_spans(layer, batch=1) for layer in apart.cache.policy_layers)
    assert_same_content(apart.cache, alone.cache, atol=1e-6)
    for found, wanted in zip(apart.logits, alone.logits, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def assert_placed(cache: Any) -> None:
    """Every layer's rows lie with the layer, all else with the decoder's input."""
    snapshot, numbers = cache._runtime.snapshot, cache.policy_layers
    for layers, rows in zip(snapshot.stores, snapshot.buffers, strict=True):
        assert {device_of(tensor) for tensor in rows.tensors()} == {LAYERS[numbers[layers[-1]]]}
    assert {device_of(part.live_BMW) for part in snapshot.maps} <= {ENDS}
    assert {device_of(tensor) for layer in snapshot.ragged for tensor in layer.map.tensors()} <= {ENDS}
    scores = snapshot.scores_LBSWX
    assert scores is None or device_of(scores) == ENDS


@pytest.mark.proves("device_map", family="llama")
@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_prompts_answers_and_turns(case: Case) -> None:
    def live(fed: Fed) -> None:
        fed.feed(20, 1, 1, 1, 1, 1, 1, 9, 1, 1)

    both(case, live)


# Mixed layers, attention sinks and caps, states, and masks that eager attention adds.
@pytest.mark.parametrize("policy", ["snapkv", "h2o", "streaming_llm", "adakv"])
@pytest.mark.parametrize("family", ["llama", "qwen2-mixed", "gpt_oss", "qwen3_next"])
def test_families_and_eager_attention(family: str, policy: str) -> None:
    def live(fed: Fed) -> None:
        fed.feed(20, 1, 1, 9, 1)

    options = {"backend": "eager"} if family == "llama" else {}
    both((policy, small_options(policy)), live, family, **options)


@pytest.mark.parametrize("case", OPERATED, ids=case_id)
def test_recorded_reordered_and_offloaded(case: Case) -> None:
    def live(fed: Fed) -> None:
        fed.feed(20, 1)
        fed.cache.activate_past_recording()
        fed.feed(4)
        fed.cache.crop(-2)
        fed.mask = fed.mask[:, :-2]
        fed.cache.set_recording(False)
        fed.feed(1)
        fed.cache.reorder_cache(torch.tensor([1, 0]))
        fed.mask = fed.mask[[1, 0]]
        fed.cache.offload()
        buffers = fed.cache._runtime.snapshot.buffers
        assert {device_of(tensor) for rows in buffers for tensor in rows.tensors()} == {HOST}
        fed.feed(1)
        fed.cache = fed.cache.fork()
        with fed.cache.branch():
            fed.feed(3)
        fed.mask = fed.mask[:, :-3]
        fed.feed(1)

    both(case, live)


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "adakv", "minicache"])
def test_saved_and_loaded(policy: str, tmp_path: Path) -> None:
    def live(fed: Fed) -> None:
        fed.feed(20, 1)
        fed.cache.save_pretrained(tmp_path / str(fed.device.index))
        fed.cache = kv.load_cache(tmp_path / str(fed.device.index), fed.model)
        fed.feed(1)

    both((policy, small_options(policy)), live)


@pytest.mark.parametrize("policy", ["snapkv", "h2o", "adakv"])
def test_a_prompt_that_is_held(policy: str) -> None:
    def live(fed: Fed) -> None:
        fed.feed(12, 8)
        fed.cache.finish_prefill()
        fed.feed(1, 1)

    both((policy, small_options(policy) | {"chunked_prefill": "hold"}), live)


def test_what_meets_on_two_devices_fails() -> None:
    with PretendedDevices():
        here, there = (torch.zeros(2, device=pretended(index)) for index in (1, 2))
        assert (here + here).device == pretended(1)
        assert here.to(there).device == pretended(2)
        for mixed in (lambda: here + there, lambda: torch.cat([here, there]), lambda: here + torch.zeros(2)):
            with pytest.raises(RuntimeError, match="same device"):
                mixed()
