"""A compiled model gives a policy cache the tokens and rows that the model itself does, and is compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from families._models import model_of
from helpers import (
    assert_same_content,
    dynamic_cache,
    forward,
    generate,
    greedy_loop,
    left_padded,
    make_cache,
    prompt,
    small_options,
    tiny,
)
from torch._dynamo.utils import counters
from transformers import LogitsProcessor, LogitsProcessorList

import hf_kvpolicy as kv

# Steps in which shapes, and numbers of tokens, are met for the first or the second time.
WARM_STEPS, STEPS = 4, 12


class Compiler:
    """A backend of torch.compile that runs graphs as they are and counts them."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        """Take one graph."""
        self.graphs += 1
        return graph.forward

    @property
    def frames(self) -> int:
        """Frames that were traced, with or without a graph."""
        return int(counters["frames"]["total"])


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    torch._dynamo.reset()
    counters.clear()
    yield Compiler()
    torch._dynamo.reset()


class Frames(LogitsProcessor):  # type: ignore[misc]
    """Notes after every forward of `generate` how many frames were traced."""

    def __init__(self, compiler: Compiler) -> None:
        self.compiler, self.seen = compiler, list[int]()

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Change nothing."""
        self.seen.append(self.compiler.frames)
        return scores


@pytest.mark.proves("compiled", family="llama")
@pytest.mark.parametrize(
    ("policy", "how"), [("snapkv", "forward"), ("streaming_llm", "in_place"), ("adakv", "forward")]
)
def test_generate(policy: str, how: str, compiler: Compiler) -> None:
    model, plain = tiny(), tiny()
    if how == "forward":
        model.forward = torch.compile(model.forward, backend=compiler)
    else:
        model.compile(backend=compiler)
    cache, wanted = (make_cache(policy, one, **small_options(policy)) for one in (model, plain))
    ids, mask = left_padded([prompt(15, seed=1), prompt(24, seed=2)])
    frames = Frames(compiler)
    found = generate(model, ids, cache, STEPS, attention_mask=mask, logits_processor=LogitsProcessorList([frames]))
    assert torch.equal(found, generate(plain, ids, wanted, STEPS, attention_mask=mask))
    assert cache.statistics.rows_dropped > 0
    assert_same_content(cache, wanted, atol=0)
    cache.check_integrity()
    assert compiler.graphs > 0, "something was compiled"
    assert len(set(frames.seen[WARM_STEPS:])) == 1, f"a decode step compiles nothing new: {frames.seen}"


@pytest.mark.parametrize("policy", ["snapkv"])
def test_a_compiled_module(policy: str, compiler: Compiler) -> None:
    """Caches take what `torch.compile` returns for the model in it; a second request compiles nothing new."""
    plain = tiny()
    model = torch.compile(tiny(), backend=compiler)
    ids, frames = prompt(20, rows=2), []
    for _ in range(2):
        cache, wanted = (make_cache(policy, one, **small_options(policy)) for one in (model, plain))
        found, expected = (greedy_loop(*of, STEPS) for of in ((model, ids, cache), (plain, ids, wanted)))
        assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
        assert_same_content(cache, wanted, atol=0)
        frames.append(compiler.frames)
    assert frames[0] == frames[1]
    assert compiler.graphs > 0
    kv.detach(model)
    with torch.no_grad():
        stock = forward(model, ids, dynamic_cache(plain))
    kv.detach(plain)
    with torch.no_grad():
        assert torch.equal(stock, forward(plain, ids, dynamic_cache(plain)))


@pytest.mark.slow  # every family is traced anew
@pytest.mark.parametrize(
    ("family", "policy"),
    [
        ("bloom", "snapkv"),
        ("gpt_oss", "h2o"),
        ("qwen3_next", "adakv"),
        ("llama", "layer_condensed"),
        ("llama", "pyramidinfer"),
    ],
)
def test_forwards_hooks_and_states_of_ours(family: str, policy: str, compiler: Compiler) -> None:
    """Forwards that are bound on instances, hooks between layers, and states of linear attention."""
    model, plain = model_of(family, layers=4), model_of(family, layers=4)
    cache, wanted = (make_cache(policy, one, **small_options(policy)) for one in (model, plain))
    model.forward = torch.compile(model.forward, backend=compiler)
    ids = prompt(20, rows=2)
    found, expected = (greedy_loop(*of, 4) for of in ((model, ids, cache), (plain, ids, wanted)))
    assert all(torch.equal(*both) for both in zip(found, expected, strict=True))
    assert_same_content(cache, wanted, atol=0)
    cache.check_integrity()
    assert compiler.graphs > 0


def test_parts_of_a_model(compiler: Compiler) -> None:
    """What holds no cache may be one graph."""
    model, plain = tiny(), tiny()
    for layer in model.model.layers:
        layer.mlp.compile(backend=compiler, fullgraph=True)
    ids = prompt(20, rows=2)
    cache, wanted = (make_cache("snapkv", one, **small_options("snapkv")) for one in (model, plain))
    assert torch.equal(generate(model, ids, cache, 4), generate(plain, ids, wanted, 4))
    assert compiler.graphs > 0
