"""At full budget MPT, Bloom and Falcon equal their own runs with transformers' cache."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import FULL, dynamic_cache, forward, generate, greedy_loop, left_padded, neutral_cache, policies, prompt

import hf_kvpolicy as kv

from ._alibi_models import KINDS, MODELS, attached, backends_of, model_of

RUNS = [(name, backend) for name in MODELS for backend in backends_of(name)]
ATOL = 1e-5


def close(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, atol=ATOL, rtol=1e-5)


def padded_turns(model: Any, cache: Any) -> torch.Tensor:
    """Two turns of a left-padded batch, so that pads lie in the middle; the logits at all real tokens."""
    first = left_padded([prompt(17), prompt(9, seed=1)])
    second = left_padded([prompt(4, seed=2), prompt(7, seed=3)])
    mask = torch.cat([first[1], second[1]], dim=1)
    seen = []
    with torch.no_grad():
        for ids, columns, own in ((first[0], 17, first[1]), (second[0], 24, second[1])):
            positions = (mask[:, :columns].cumsum(-1) - 1).clamp(min=0)[:, -ids.shape[1] :]
            logits = forward(model, ids, cache, attention_mask=mask[:, :columns], position_ids=positions)
            seen.append(logits[own.bool()])
    return torch.cat(seen)


@pytest.mark.proves("parity_padded", "parity_beams", "parity_turns", "parity_chunked", policy="full")
@pytest.mark.parametrize(("name", "backend"), RUNS)
def test_greedy_padded_beams_turns_and_chunks(name: str, backend: str) -> None:
    stock, model = model_of(name, backend), attached(name, backend)
    ids, mask = left_padded([prompt(21), prompt(13, seed=1)])
    wanted = greedy_loop(stock, ids, dynamic_cache(stock), 6, mask)
    given = greedy_loop(model, ids, kv.FullCache(model), 6, mask)
    assert torch.equal(given[0], wanted[0])
    close(given[1], wanted[1])
    assert torch.equal(
        generate(model, ids, kv.FullCache(model), attention_mask=mask, num_beams=3),
        generate(stock, ids, dynamic_cache(stock), attention_mask=mask, num_beams=3),
    )
    close(padded_turns(model, kv.FullCache(model)), padded_turns(stock, dynamic_cache(stock)))
    with torch.no_grad():
        whole, cache = forward(stock, ids[:1], dynamic_cache(stock)), kv.FullCache(model)
        close(torch.cat([forward(model, part, cache) for part in ids[:1].split(8, dim=1)], dim=1), whole)


@pytest.mark.proves("parity_padded")
@pytest.mark.parametrize(
    ("name", "policy"),
    [
        (name, policy)
        for name in KINDS
        for policy in (policies(lossy=True) if FULL or name.startswith("mpt") else ("snapkv", "streaming_llm", "adakv"))
    ],
)
def test_policies_at_neutral_options(name: str, policy: str) -> None:
    stock, model = model_of(name), attached(name)
    ids, mask = left_padded([prompt(21), prompt(13, seed=1)])
    wanted = greedy_loop(stock, ids, dynamic_cache(stock), 6, mask)
    given = greedy_loop(model, ids, neutral_cache(policy, model, 40), 6, mask)
    assert torch.equal(given[0], wanted[0])
    close(given[1], wanted[1])


@pytest.mark.proves("parity_assisted", policy="full")
@pytest.mark.parametrize("name", KINDS)
def test_prompt_lookup(name: str) -> None:
    stock, model = model_of(name), attached(name)
    ids = torch.cat([prompt(9), prompt(9)], dim=1)
    wanted = generate(stock, ids, dynamic_cache(stock), new=8, prompt_lookup_num_tokens=3)
    assert torch.equal(generate(model, ids, kv.FullCache(model), new=8, prompt_lookup_num_tokens=3), wanted)
