"""An attached model given any other cache is bit for bit the model never attached; detach undoes everything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from families._models import model_of
from helpers import BACKENDS, CACHE, FAMILIES, dynamic_cache, forward, left_padded, prompt, tiny
from torch import Tensor
from transformers import StaticCache

import hf_kvpolicy as kv

HOOKS = ("_forward_pre_hooks", "_forward_hooks")
PLACES = [(family, backend) for family in FAMILIES for backend in BACKENDS]


def _runs(model: Any) -> dict[str, Tensor]:
    """Return outputs of every way to use a model without a policy cache."""
    ids, mask = left_padded([prompt(11, 1), prompt(6, 2), prompt(9, 3)])
    found: dict[str, Tensor] = {}
    with torch.no_grad():
        found["no cache"] = model(ids, attention_mask=mask, use_cache=False).logits
        found["own cache"] = model(ids, attention_mask=mask, use_cache=True).logits
        cache = dynamic_cache(model)
        found["dynamic"] = forward(model, ids, cache, attention_mask=mask)
        wider = torch.cat([mask, torch.ones_like(mask[:, :2])], dim=1)
        found["dynamic, second"] = forward(model, prompt(2, 4, 3), cache, attention_mask=wider)
        static = StaticCache(config=model.config, max_cache_len=24)
        found["static"] = forward(model, ids, static, attention_mask=mask)
        found["static, second"] = forward(model, prompt(1, 5, 3), static, attention_mask=wider[:, :-1])
        arguments: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 5}
        found["generate"] = model.generate(ids, **arguments)
        found["generate, dynamic"] = model.generate(ids, **{CACHE: dynamic_cache(model)}, **arguments)
        found["generate, uncached"] = model.generate(ids, use_cache=False, **arguments)
        found["generate, beams"] = model.generate(ids, num_beams=3, **arguments)
    return found


def _assert_equal(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        assert torch.equal(value, right[name]), name


@pytest.mark.parametrize(("family", "backend"), PLACES)
def test_attached_equals_unattached(family: str, backend: str) -> None:
    plain = tiny(family, backend)
    expected = _runs(plain)
    attached = kv.attach(tiny(family, backend))
    _assert_equal(_runs(attached), expected)
    with torch.no_grad():
        forward(attached, prompt(9, 7), kv.SnapKVCache(attached, budget=6, window=3))
    _assert_equal(_runs(attached), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_caches_after_a_dead_forward(backend: str) -> None:
    """A policy forward that died between update and attention leaves nothing that the next cache could meet."""
    expected = _runs(tiny("llama", backend))
    model = tiny("llama", backend)
    cache = kv.StreamingLLMCache(model, budget=7)
    for name in ("self_attn.q_proj", "mlp"):
        handle = model.model.layers[1].get_submodule(name).register_forward_pre_hook(_interrupt)
        with pytest.raises(KeyboardInterrupt):
            forward(model, prompt(9, 7), cache)
        handle.remove()
        _assert_equal(_runs(model), expected)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def _fingerprint(model: Any) -> dict[str, Any]:
    """Return what attach could leave on a model."""
    found: dict[str, Any] = {"implementation": model.config._attn_implementation, "config": model.config.to_dict()}
    for name, module in model.named_modules():
        hooks = {key: list(value) for key, value in vars(module).items() if key.endswith("_hooks")}
        found[name] = (
            sorted(vars(module)),
            hooks,
            list(module._forward_pre_hooks_with_kwargs),
            module.forward.__func__,
        )
    return found


@pytest.mark.parametrize(("family", "backend"), PLACES)
def test_detach_restores_everything(family: str, backend: str) -> None:
    model = tiny(family, backend)
    before, expected = _fingerprint(model), _runs(model)
    mine = model.model.register_forward_pre_hook(lambda *_: None)
    for _ in range(2):
        assert kv.attach(model) is model
        assert kv.attach(model) is model
        assert kv.attached_backend(model) == backend
        hooks = [hook for hook in model.model._forward_pre_hooks.values() if "kvpolicy" in hook.__module__]
        assert len(hooks) == 1, "attaching twice leaves one hook"
        with torch.no_grad():
            forward(model, prompt(9, 7), kv.SnapKVCache(model, budget=6, window=3))
        kv.detach(model)
        assert list(model.model._forward_pre_hooks) == [mine.id], "somebody else's hook stays"
    kv.detach(model)
    mine.remove()
    after = _fingerprint(model)
    assert after == before
    _assert_equal(_runs(model), expected)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_copy_of_an_attached_model_is_attached(backend: str) -> None:
    model = kv.attach(tiny("llama", backend))
    twin = kv.attach(copy.deepcopy(model))
    caches = [kv.SnapKVCache(m, budget=6, window=3) for m in (model, twin)]
    with torch.no_grad():
        logits = [forward(m, prompt(12, 7), c) for m, c in zip((model, twin), caches, strict=True)]
    assert torch.equal(*logits)
    kv.detach(model)
    assert kv.attached_backend(twin) == backend
    with torch.no_grad():
        forward(twin, prompt(1, 8), caches[1])
    kv.detach(twin)
    _assert_equal(_runs(twin), _runs(tiny("llama", backend)))


def test_a_detached_model_refuses_a_used_cache() -> None:
    model = tiny("llama")
    cache = kv.SnapKVCache(model, budget=6, window=3)
    forward(model, prompt(12, 7), cache)
    kv.detach(model)
    with pytest.raises(kv.ConfigError, match=r"attach\(model\)"):
        forward(model, prompt(1, 8), cache)
    assert cache.get_seq_length() == 12


@pytest.mark.parametrize("family", ["llama", "phi3-partial", "qwen3_next"])
def test_detach_after_another_implementation_was_chosen(family: str) -> None:
    model = kv.attach(model_of(family))
    model.set_attn_implementation("eager")
    kv.detach(model)
    hooks = [hook for part in model.modules() for kind in HOOKS for hook in getattr(part, kind).values()]
    assert not any(str(getattr(hook, "__module__", "")).startswith("hf_kvpolicy") for hook in hooks)
    assert "prepare_inputs_for_generation" not in vars(model)
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize("layers", [1, 2])
def test_a_cache_under_another_implementation_is_refused(layers: int) -> None:
    """With one layer nothing comes behind the attention that did not know of the cache."""
    model = tiny("llama", layers=layers)
    cache = kv.SnapKVCache(model, budget=6, window=3)
    model.set_attn_implementation("eager")
    with pytest.raises(kv.ConfigError, match=r"attach\(model\)"):
        forward(model, prompt(12), cache)
    with torch.no_grad():
        forward(kv.attach(model), prompt(12), cache)
    assert cache.get_seq_length() == 12
