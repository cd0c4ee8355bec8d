"""bf16 and fp16 on a CPU: parity at full budget, and what is stored and scored below it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import dynamic_cache, forward, generate, make_cache, neutral_cache, prompt, small_options
from torch import Tensor

from hf_kvpolicy.evidence import WindowVotes

from ._models import model_of

POLICIES = ("snapkv", "streaming_llm", "adakv", "h2o")
STEPS = 8

pytestmark = [
    pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"]),
    pytest.mark.parametrize("family", ["llama", "mistral_window", "mpt", "gemma2", "qwen3"]),
]


def _forced(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Return the logits of the last prompt token and of every later one, all tokens given."""
    pieces = [ids[:, :-STEPS], *ids[:, -STEPS:].split(1, dim=1)]
    with torch.no_grad():
        return torch.cat([forward(model, piece, cache)[:, -1:] for piece in pieces], dim=1)


@pytest.mark.proves("parity_half")
@pytest.mark.parametrize("policy", ["full", *POLICIES])
def test_full_budget_equals_the_default_cache(family: str, policy: str, dtype: torch.dtype) -> None:
    model = model_of(family).to(dtype)
    ids = generate(model, prompt(20), dynamic_cache(model), STEPS)
    wanted = _forced(model, dynamic_cache(model), ids)
    found = _forced(model, neutral_cache(policy, model, 64), ids)
    assert found.dtype == dtype
    # One rounding of the largest logit for each of up to four layers: a policy that reads attention has another kernel.
    tolerance = 4 * torch.finfo(dtype).eps * float(wanted.abs().max())
    torch.testing.assert_close(found, wanted, atol=tolerance, rtol=0)
    best = wanted.float().topk(2).values
    clear = best[..., 0] - best[..., 1] > 2 * tolerance
    assert clear.any(), "some choice is no tie"
    assert torch.equal(found.argmax(-1)[clear], wanted.argmax(-1)[clear])
    if policy != "h2o":
        assert torch.equal(generate(model, prompt(20), neutral_cache(policy, model, 64), STEPS), ids)


@pytest.mark.proves("half")
@pytest.mark.parametrize("policy", POLICIES)
def test_below_the_budget(family: str, policy: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    voted, own = [], WindowVotes.votes

    def recorded(self: WindowVotes, *args: Any, **kwargs: Any) -> Tensor:
        voted.append(own(self, *args, **kwargs))
        return voted[-1]

    monkeypatch.setattr(WindowVotes, "votes", recorded)
    model = model_of(family).to(dtype)
    cache = make_cache(policy, model, **small_options(policy))
    out = generate(model, prompt(30, rows=2), cache, STEPS, output_logits=True, return_dict_in_generate=True)
    assert all(step.isfinite().all() for step in out.logits)
    assert cache.statistics.rows_dropped > 0
    carried = cache._runtime.snapshot.scores_LBSWX
    scores = [*voted, *([] if carried is None else [carried])]
    assert bool(scores) == (policy != "streaming_llm")
    assert {each.dtype for each in scores} <= {torch.float32}
    for layer in cache.policy_layers:
        keys, values = cache.stored_view(layer)
        assert keys.dtype == values.dtype == dtype
    ledger, rows = cache.ledger(), sum(int(cache.stored_rows(layer).sum()) for layer in cache.policy_layers)
    assert ledger.payload_rows == rows
    assert ledger.payload_bytes == rows * (keys.shape[-1] + values.shape[-1]) * dtype.itemsize
    assert ledger.declared_bytes == ledger.measured_bytes
    cache.check_integrity()
