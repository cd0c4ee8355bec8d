"""A model that attach refuses is left exactly as it was, and what somebody else set on an instance is never lost."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from families._models import model_of
from families._wrappers import tiny_wrapper
from helpers import CACHE, declared, forward, prompt, tiny
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

import hf_kvpolicy as kv
from hf_kvpolicy.frame import READER


def _left_on(model: Any) -> dict[str, Any]:
    """Return everything that attaching could change, by identity where it is an object."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules():
        state = {key: id(value) for key, value in vars(module).items()}
        hooks = {key: list(value.items()) for key, value in vars(module).items() if "_hooks" in key}
        named = module.config._attn_implementation if isinstance(module, PreTrainedModel) else None
        found[name] = (state, hooks, named)
    return found


class AttentionElsewhere(LlamaAttention):
    """Llama's, in a module without an eager function."""


def _unnumbered(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "layer_idx") and "Attention" in type(module).__name__:
            module.layer_idx = None


def _elsewhere(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.__class__ = AttentionElsewhere


def _deaf(model: Any) -> None:
    """Make the model's class keep its implementation, as old code does; what is inside takes any."""
    kind = type(model)
    model.__class__ = type(kind.__name__, (kind,), {"_can_set_attn_implementation": classmethod(lambda cls: False)})
    model.model.config = copy.deepcopy(model.config)


def _replaced_method(model: Any) -> None:
    model.prepare_inputs_for_generation = lambda *_, **__: {}


def _replaced_forward(model: Any) -> None:
    last = [
        part for part in model.modules() if hasattr(part, "layer_idx") and type(part).__name__.endswith("Attention")
    ]
    last[-1].forward = lambda *_, **__: None


def _whole(model: Any) -> None:
    """Damage nothing: the backend is what is refused."""


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], None], str | None, str]] = {
    "no layer index": (lambda: tiny("llama"), _unnumbered, None, "no attention layer with a layer index"),
    "no layer index, hybrid": (lambda: model_of("qwen3_next"), _unnumbered, None, "no attention layer"),
    "no layer index, images": (lambda: tiny_wrapper("llava"), _unnumbered, None, "no attention layer"),
    "no eager function": (lambda: tiny("llama"), _elsewhere, "eager", "no eager attention function of its own"),
    "own implementation": (lambda: tiny("llama"), _deaf, None, "keeps its own attention implementation .'sdpa'"),
    "own method": (lambda: model_of("phi3-partial"), _replaced_method, None, "'prepare_inputs_for_generation'.*yours"),
    "own forward": (lambda: model_of("bloom"), _replaced_forward, None, "was replaced on the instance"),
    "no sinks": (lambda: model_of("gpt_oss"), _whole, "sdpa", 'backend="eager"'),
    "no bias": (lambda: model_of("mpt"), _whole, "flex_attention", "Possible: sdpa, eager"),
    "no such backend": (lambda: model_of("phi3-partial"), _whole, "paged|sdpa", "cannot be wrapped"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refused_attach_changes_nothing(case: str) -> None:
    make, damage, backend, words = REFUSED[case]
    model = make()
    damage(model)
    before = _left_on(model)
    for _ in range(2):
        with pytest.raises((kv.UnsupportedModelError, kv.BackendAdmissionError), match=words):
            kv.attach(model, backend)
        assert _left_on(model) == before
        kv.detach(model)
        assert _left_on(model) == before


def test_another_backend_is_refused_and_the_first_one_stays() -> None:
    model = kv.attach(model_of("gpt_oss"))
    before = _left_on(model)
    with pytest.raises(kv.BackendAdmissionError, match='backend="eager"'):
        kv.attach(model, "sdpa")
    assert _left_on(model) == before
    assert kv.attached_backend(model) == "eager"


def test_a_decoder_that_cannot_be_repeated_is_refused_before_anything_is_named() -> None:
    model = declared(tiny("llama", layers=4), "layer_condensed")
    model.model.forward = MethodType(type(model.model).forward, model.model)
    before = _left_on(model)
    with pytest.raises(kv.UnsupportedModelError, match="was replaced on the instance"):
        kv.attach(model)
    assert _left_on(model) == before


def test_a_method_set_while_attached_stays() -> None:
    model = kv.attach(model_of("phi3-partial"))
    watched = model.prepare_inputs_for_generation
    mine = model.prepare_inputs_for_generation = lambda *args, **kwargs: watched(*args, **kwargs)
    kv.detach(model)
    assert vars(model)["prepare_inputs_for_generation"] is mine
    with pytest.raises(kv.UnsupportedModelError, match=r"del model\.prepare_inputs_for_generation"):
        kv.attach(model)
    del model.prepare_inputs_for_generation
    kv.detach(kv.attach(model))
    assert "prepare_inputs_for_generation" not in vars(model)


@pytest.mark.parametrize("family", ["llama", "phi3-partial", "bloom", "qwen3_next"])
def test_an_attached_model_can_be_pickled(family: str) -> None:
    model = kv.attach(model_of(family))
    twin = pickle.loads(pickle.dumps(model))
    assert kv.attached_backend(twin) == kv.attached_backend(model)
    outputs = []
    for each in (model, twin):
        cache = kv.SnapKVCache(each, budget=6, window=3)
        with torch.no_grad():
            outputs.append(torch.cat([forward(each, prompt(n), cache) for n in (12, 1)], dim=1))
    assert torch.equal(*outputs)
    kv.detach(twin)
    ours = ("forward", "prepare_inputs_for_generation")
    assert not any(name in vars(module) for module in twin.modules() for name in ours)


class _Dies(Exception):
    """What no model raises."""


@pytest.mark.parametrize("error", [_Dies, KeyboardInterrupt])
def test_a_call_that_died_before_its_decoder_is_forgotten(error: type[BaseException]) -> None:
    """It read the last position alone; whoever calls the decoder next reads all of them."""
    model = kv.attach(tiny("llama"))

    def die(*_: Any) -> None:
        raise error

    cache, other = (kv.PyramidInferCache(model, budget=8) for _ in range(2))
    handle = model.model.register_forward_pre_hook(die, prepend=True)
    with pytest.raises(error), torch.no_grad():
        model(prompt(24), **{CACHE: cache}, logits_to_keep=1)
    handle.remove()
    # torch calls no hook where a process is interrupted; the call is then known by its cache.
    assert (READER.get() is None) == (error is _Dies)
    with pytest.raises(kv.ConfigError, match="output at every position"), torch.no_grad():
        model.model(prompt(24), **{CACHE: other})
    assert READER.get() is None
    with torch.no_grad():
        assert torch.equal(model(prompt(24)).logits, tiny("llama")(prompt(24)).logits)
        model(prompt(24), **{CACHE: cache}, logits_to_keep=1)
    assert cache.get_seq_length() == 24
    assert READER.get() is None


def test_an_image_that_does_not_fit_leaves_no_call_behind() -> None:
    model = kv.attach(tiny_wrapper("llava"))
    cache = kv.PyramidInferCache(model, budget=8)
    with pytest.raises(Exception, match=r"."), torch.no_grad():
        model(prompt(24), pixel_values=torch.zeros(1, 2, 3), **{CACHE: cache}, logits_to_keep=1)
    assert READER.get() is None
    decoder = model.get_decoder()
    embeddings = model.get_input_embeddings()(prompt(24))
    with pytest.raises(kv.ConfigError, match="output at every position"), torch.no_grad():
        decoder(inputs_embeds=embeddings, **{CACHE: cache})
