"""Below the budget, padded beams, turns and chunks of families that set models apart equal each prompt alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import forward, generate, kept_positions, left_padded, options_for, prompt, small_options
from torch import Tensor

import hf_kvpolicy as kv

from ._models import model_of

FAMILIES = ("mistral_window", "mpt", "gemma2", "qwen3")
POLICIES = ("snapkv", "streaming_llm", "adakv")
LENGTHS = (30, 3, 17)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning"),
    pytest.mark.parametrize("policy", POLICIES),
    pytest.mark.parametrize("family", FAMILIES),
]


def make(policy: str, model: Any, **options: Any) -> Any:
    return kv.make_cache(policy, model, **options_for(model, policy, small_options(policy)), **options)


@pytest.mark.proves("padded", "beams")
def test_beams_of_a_padded_batch(family: str, policy: str) -> None:
    model = model_of(family)
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    ids, mask = left_padded(prompts)
    out = generate(model, ids, make(policy, model), 6, attention_mask=mask, num_beams=3)
    for row, tokens in enumerate(prompts):
        alone = generate(model, tokens, make(policy, model), 6, num_beams=3)
        assert out[row, ids.shape[1] :].tolist() == alone[0, tokens.shape[1] :].tolist(), f"row {row}"


def feed(model: Any, cache: Any, ids: Tensor, mask: Tensor, splits: list[int]) -> Tensor:
    """Return the logits of pieces fed one after another."""
    logits, done = [], 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for width in splits:
            here = slice(done, done + width)
            done += width
            given = {"attention_mask": mask[:, :done], "position_ids": positions[:, here]}
            if width:  # else the prompt has no token in this piece
                logits.append(forward(model, ids[:, here], cache, **given))
    return torch.cat(logits, dim=1)


@pytest.mark.proves("padded", "turns")
def test_a_later_turn_of_a_padded_batch(family: str, policy: str) -> None:
    _pieces_equal_each_prompt_alone(family, policy, [30, 1, 1, 8, 1, 1], {})


@pytest.mark.proves("padded", "chunked")
@pytest.mark.parametrize("chunked", ["hold", "bounded"])
def test_a_padded_prompt_in_chunks(family: str, policy: str, chunked: str) -> None:
    _pieces_equal_each_prompt_alone(family, policy, [10, 10, 10, 1, 1, 1], {"chunked_prefill": chunked})


def _pieces_equal_each_prompt_alone(family: str, policy: str, splits: list[int], options: dict[str, Any]) -> None:
    model, width = model_of(family), max(LENGTHS)
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    tail = prompt(sum(splits) - width, seed=3, rows=len(LENGTHS))
    ids, mask = torch.cat([ids, tail], dim=1), torch.cat([mask, torch.ones_like(tail)], dim=1)
    batched = make(policy, model, **options)
    logits = feed(model, batched, ids, mask, splits)
    for row, length in enumerate(LENGTHS):
        first = width - length
        solo, alone = make(policy, model, **options), ids[row : row + 1, first:]
        pieces = [int(part.sum()) for part in mask[row].split(splits)]
        expected = feed(model, solo, alone, torch.ones_like(alone), pieces)
        torch.testing.assert_close(logits[row : row + 1, first:], expected, atol=2e-5, rtol=1e-4)
        assert kept_positions(batched, row) == kept_positions(solo)
    assert batched.statistics.rows_dropped > 0
    batched.check_integrity()
