"""A cache in use, and an equal one that nobody disturbs: what a refusal must leave behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import assert_same_content, content, forward, model_for, policies, prompt, small_options

import hf_kvpolicy as kv
from hf_kvpolicy.config import policy_options

NAMES = policies()
ATTACH = r"hf_kvpolicy\.attach\(model\)"
BUDGETED = [name for name in NAMES if "budget" in policy_options(name)]


def make(name: str, model: Any, **options: Any) -> Any:
    return kv.make_cache(name, model, **{**small_options(name), **options})


class Started:
    """A cache that has been fed a prompt and two tokens, and an equal one that nobody disturbs."""

    def __init__(self, name: str, model: Any | None = None, rows: int = 2) -> None:
        self.model = model or model_for(name, "llama")
        self.caches = [make(name, self.model) for _ in range(2)]
        self.cache, self.calm = self.caches
        self.ids = prompt(40, rows=rows)
        with torch.no_grad():
            for cache in self.caches:
                for start, stop in ((0, 20), (20, 21), (21, 22)):
                    forward(self.model, self.ids[:, start:stop], cache)

    @contextmanager
    def refuses(self, error: type[Exception], match: str) -> Iterator[None]:
        """The body fails by that error; afterwards the cache is unchanged, consistent and usable."""
        before, state = content(self.cache), self.cache.state
        with pytest.raises(error, match=f"(?s){match}"), torch.no_grad():
            yield
        assert self.cache.state.cache_generation == state.cache_generation
        after = content(self.cache)
        assert before.keys() == after.keys()
        for key, value in before.items():
            assert torch.equal(value, after[key]) if isinstance(value, torch.Tensor) else value == after[key], key
        self.goes_on()

    def goes_on(self) -> None:
        """The next forwards equal those of the undisturbed cache, bit for bit."""
        self.cache.check_integrity()
        with torch.no_grad():
            for start, stop in ((22, 23), (23, 30), (30, 31)):
                left, right = (forward(self.model, self.ids[:, start:stop], cache) for cache in self.caches)
                assert torch.equal(left, right)
        assert_same_content(self.cache, self.calm, atol=0)
        self.cache.check_integrity()
