"""Which backend runs a view, and that it runs as it would without us."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import forward, generate, model_for, prompt, small_options, tiny
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy import backends


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Attention written out, KV heads repeated; [B, T, Q, D]."""
    group = query.shape[1] // keys.shape[1]
    keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    logits = query @ keys.transpose(2, 3) * scaling
    if mask is not None:
        heads = mask if mask.shape[1] == 1 else mask.repeat_interleave(group, 1)
        logits = logits.masked_fill(~heads, float("-inf"))
    return (logits.softmax(-1) @ values).transpose(1, 2)


@pytest.mark.parametrize(("stored", "mask_heads"), [(2, 1), (2, 2), (6, 6), (6, 1), (1, 1)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_grouped_attention_equals_the_written_out_one(stored: int, mask_heads: int, tokens: int) -> None:
    query, keys = torch.randn(3, 6, tokens, 8), torch.randn(3, stored, 11, 8)
    values = torch.randn(3, stored, 11, 8)
    mask = torch.rand(3, mask_heads, tokens, 11) > 0.4
    mask[..., -1] = True
    for given in (None, mask):
        ours = backends.grouped_attention(query, keys, values, given, scaling=0.3)
        torch.testing.assert_close(ours, _attention(query, keys, values, given, 0.3), atol=1e-5, rtol=1e-5)


def test_blocks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    query, keys, values = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    mask = torch.ones(1, 1, 9, 20, dtype=torch.bool).tril(11)
    whole = backends.grouped_attention(query, keys, values, mask, scaling=0.3)
    monkeypatch.setattr(backends, "MASK_BLOCK_ELEMENTS", 80)
    torch.testing.assert_close(backends.grouped_attention(query, keys, values, mask, scaling=0.3), whole)


def test_flash_functions_see_their_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' flash function picks its kernel by the name in the module's config."""
    seen: dict[str, Any] = {}

    def flash(
        module: Any, query: Tensor, keys: Tensor, values: Tensor, mask: Any, **kwargs: Any
    ) -> tuple[Tensor, None]:
        seen.update(name=module.config._attn_implementation, layer=module.layer_idx, mask=mask, **kwargs)
        seen["hidden"] = module.config.hidden_size
        return torch.zeros(query.shape[0], query.shape[2], query.shape[1], values.shape[3]), None

    monkeypatch.setattr(backends, "attention_function", lambda name: flash)
    config = SimpleNamespace(_attn_implementation="kvpolicy_fa2", hidden_size=32)
    module: Any = SimpleNamespace(config=config, layer_idx=3, num_key_value_groups=2)
    query, keys, values = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    out = backends.attend_view(
        "flash_attention_2", module, query, keys, values, None, {"scaling": 0.3, "sliding_window": 9}
    )
    assert seen["name"] == "flash_attention_2"
    assert (seen["layer"], seen["hidden"], seen["mask"]) == (3, 32, None)
    # The window is the policy's business here: flash would count it in slots.
    assert "sliding_window" not in seen
    assert out.shape == (1, 1, 4, 8)
    assert config._attn_implementation == "kvpolicy_fa2"


def test_flash_with_a_mask_runs_exact_sdpa_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a masked view must not reach flash")

    monkeypatch.setattr(backends, "attention_function", lambda name: flash)
    module: Any = SimpleNamespace(num_key_value_groups=2)
    query, keys, values = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    mask = torch.tensor([True, False, True, True, True]).view(1, 1, 1, 5)
    out = backends.attend_view("flash_attention_2", module, query, keys, values, mask, {"scaling": 0.3})
    torch.testing.assert_close(out, _attention(query, keys, values, mask, 0.3))


@pytest.mark.parametrize("backend", ["flash_attention_2", "flash_attention_3"])
def test_a_backend_that_is_not_installed_is_refused(backend: str) -> None:
    model = tiny("llama")
    if backends.backend_is_available(backend):
        pytest.skip(f"{backend} is installed here")
    with pytest.raises(kv.BackendAdmissionError, match='attach\\(model, backend="sdpa"\\)'):
        kv.attach(model, backend)
    assert model.config._attn_implementation == "sdpa"


def test_an_unknown_backend_is_refused_by_name() -> None:
    with pytest.raises(kv.BackendAdmissionError, match="sdpa"):
        kv.attach(tiny("llama"), "xformers")


@pytest.mark.parametrize("name", kv.available_policies())
@pytest.mark.parametrize("extra", ["softcap", "s_aux", "position_bias"])
def test_attention_features_that_are_not_handled_are_refused(name: str, extra: str) -> None:
    """In a first prompt, a decode step and a later prompt: no kind of forward scores or attends as if they were not."""
    model = model_for(name, "llama")
    options = {} if name == "full" else small_options(name)
    cache, fresh = (kv.make_cache(name, model, **options) for _ in range(2))
    generate(model, prompt(20), cache)
    before, ran = cache.receipt, type(model.model.layers[1].self_attn).forward

    def with_extra(*args: Any, **kwargs: Any) -> Any:
        return ran(model.model.layers[1].self_attn, *args, **kwargs, **{extra: 30.0})

    model.model.layers[1].self_attn.forward = with_extra
    for held, length in ((fresh, 20), (cache, 1), (cache, 5)):
        with pytest.raises(kv.BackendAdmissionError, match=f"{extra}.*(own cache|eager)"):
            forward(model, prompt(length), held)
    cache.rollback()
    assert cache.receipt == before
    assert not fresh.is_initialized
    del model.model.layers[1].self_attn.forward
    forward(model, prompt(1), cache)
    cache.check_integrity()
