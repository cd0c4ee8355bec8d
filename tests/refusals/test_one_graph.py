"""A model compiled as one graph is refused for policy caches, and nothing is lost by it."""

from __future__ import annotations

import pytest
import torch
from helpers import dynamic_cache, forward
from refusals.started import Started

import hf_kvpolicy as kv


@pytest.mark.proves("one_graph", family="llama", refused=True)
@pytest.mark.parametrize("policy", ["snapkv", "streaming_llm", "adakv"])
def test_is_refused_and_the_cache_goes_on(policy: str) -> None:
    started = Started(policy)
    torch._dynamo.reset()
    try:
        compiled = torch.compile(started.model, backend="eager", fullgraph=True)
        refused = pytest.raises(torch._dynamo.exc.TorchDynamoException, match=r"compile it without fullgraph=True")
        with refused, torch.no_grad():
            forward(compiled, started.ids[:, 22:23], started.cache)
    finally:
        torch._dynamo.reset()
    started.goes_on()
    with torch.no_grad():
        found = forward(started.model, started.ids, dynamic_cache(started.model))
        kv.detach(started.model)
        assert torch.equal(forward(started.model, started.ids, dynamic_cache(started.model)), found)
