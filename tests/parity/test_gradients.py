"""Gradients outside of no_grad: what flows, stored rows without a graph, and modes of autograd that change midway."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from helpers import CACHE, content, forward, make_cache, neutral_cache, prompt, small_options, tiny
from torch import Tensor
from transformers import DynamicCache

POLICIES = ("snapkv", "streaming_llm", "adakv", "h2o")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning"),
    pytest.mark.parametrize("policy", POLICIES),
]


class Rows(DynamicCache):
    """transformers' own cache; once `stored`, what it hands to attention carries no graph."""

    stored = False

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(*args, **kwargs)
        return (keys.detach(), values.detach()) if self.stored else (keys, values)


def _gradients(model: Any, cache: Any, ids: Tensor) -> list[Tensor | None]:
    """Return the gradients of a weighted sum of logits: of the tokens fed, and of layer 0's projections."""
    inputs = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=inputs, use_cache=True, **{CACHE: cache}).logits
    weights = torch.linspace(-1, 1, logits.numel()).view_as(logits)
    attention = model.model.layers[0].self_attn
    wanted = [inputs, *(getattr(attention, name).weight for name in ("q_proj", "k_proj", "v_proj", "o_proj"))]
    return list(torch.autograd.grad((logits * weights).sum(), wanted, allow_unused=True))


def _assert_no_graph(cache: Any) -> None:
    stored = [part for part in content(cache).values() if isinstance(part, Tensor)]
    scores = cache._runtime.snapshot.scores_LBSWX
    assert stored
    assert not any(part.requires_grad for part in [*stored, *([] if scores is None else [scores])])


@pytest.mark.proves("gradients", family="llama")
def test_of_a_forwards_own_tokens(policy: str) -> None:
    """A first forward has all of them; in later ones nothing flows through keys and values, as they are stored rows."""
    model = tiny()
    cache, stock = neutral_cache(policy, model, 64), Rows(config=model.config)
    for piece in prompt(24).split([16, 1, 7], dim=1):
        for found, wanted in zip(_gradients(model, cache, piece), _gradients(model, stock, piece), strict=True):
            if wanted is None:
                assert stock.stored
                assert found is None
                continue
            assert found is not None
            torch.testing.assert_close(found, wanted, atol=1e-5 * float(wanted.abs().max()), rtol=1e-4)
        _assert_no_graph(cache)
        for layer in stock.layers:
            layer.keys, layer.values = layer.keys.detach(), layer.values.detach()
        stock.stored = True
    cache.check_integrity()


@pytest.mark.proves("gradients", family="llama")
@pytest.mark.parametrize("order", ["grad-inference", "inference-grad", "alternating"])
def test_modes_change_midway(policy: str, order: str) -> None:
    """Whether a forward builds a graph changes nothing of what is kept, nor of what follows."""
    model = tiny()
    mixed, calm = (make_cache(policy, model, **small_options(policy)) for _ in range(2))
    pieces = prompt(30).split([20, 1, 1, 5, 1, 1, 1], dim=1)
    for step, piece in enumerate(pieces):
        grad = {"grad-inference": step < 2, "inference-grad": step >= 2, "alternating": step % 2 == 0}[order]
        with nullcontext() if grad else torch.inference_mode():
            found = forward(model, piece, mixed)
        assert found.requires_grad == grad
        with torch.no_grad():
            wanted = forward(model, piece, calm)
        torch.testing.assert_close(found, wanted, atol=2e-5, rtol=0)
        _assert_no_graph(mixed)
    assert mixed.statistics.rows_dropped > 0
    a, b = content(mixed), content(calm)
    assert all(value == b[key] for key, value in a.items() if not isinstance(value, Tensor))
    mixed.check_integrity()
