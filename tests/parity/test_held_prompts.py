"""A prompt held while it comes in chunks is the prompt that comes at once, whatever the policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import case_id, forward, kept_positions, left_padded, make_cache, policy_units, prompt, tiny

import hf_kvpolicy as kv


def _takes_hold(case: tuple[str, dict[str, Any]]) -> bool:
    try:
        make_cache(case[0], tiny("llama"), **case[1], chunked_prefill="hold")
    except (kv.ConfigError, kv.ManifestError):
        return False
    return True


CASES = [case for case in policy_units() if "chunked_prefill" not in case[1] and _takes_hold(case)]


@pytest.mark.parametrize("case", CASES, ids=case_id)
@pytest.mark.parametrize("lengths", [(30,), (30, 17, 23)], ids=["alone", "padded"])
def test_chunks_that_are_held_are_the_prompt_at_once(
    case: tuple[str, dict[str, Any]], lengths: tuple[int, ...]
) -> None:
    name, options = case
    model = tiny("llama")
    held, whole = (make_cache(name, model, **options, **more) for more in ({"chunked_prefill": "hold"}, {}))
    ids, mask = left_padded([prompt(length, seed=length) for length in lengths])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for start in range(0, 30, 8):
            part = slice(start, start + 8)
            seen = {"attention_mask": mask[:, : start + 8], "position_ids": positions[:, part]}
            last = forward(model, ids[:, part], held, **seen)[:, -1]
        at_once = forward(model, ids, whole, attention_mask=mask, position_ids=positions)[:, -1]
        torch.testing.assert_close(last, at_once, atol=1e-5, rtol=1e-4)
        for step in range(6):
            fed, mask = prompt(1, 50 + step, rows=len(lengths)), torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
            seen = {"attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
            ours, theirs = (forward(model, fed, each, **seen) for each in (held, whole))
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    for row in range(len(lengths)):
        assert kept_positions(held, row) == kept_positions(whole, row)
    held.check_integrity()


@pytest.mark.parametrize("removed", [1, 3, 20])
def test_queries_of_a_held_prompt_are_not_taken_back_unseen(removed: int) -> None:
    """The last ones choose: those before them are gone, so that a shorter prompt would be chosen from by fewer."""
    model = tiny("llama")
    cache = make_cache("snapkv", model, budget=8, window=3, chunked_prefill="hold")
    with torch.no_grad():
        for step in range(3):
            forward(model, prompt(8, step), cache)
    with pytest.raises(kv.StaleGenerationError, match="last queries of a held prompt"):
        cache.crop(-removed)
    assert cache.get_seq_length() == 24
    short = make_cache("snapkv", model, budget=9, window=8, chunked_prefill="hold")
    with torch.no_grad():
        forward(model, prompt(6), short)
        short.crop(-1)
    assert short.get_seq_length() == 5, "all queries are held"


def test_a_held_prompt_that_was_cropped_is_split_by_batch_rows() -> None:
    model = tiny("llama")
    cache = make_cache("snapkv", model, budget=8, window=4, chunked_prefill="hold")
    with torch.no_grad():
        forward(model, prompt(4, rows=2), cache)
        cache.crop(-1)
    cache.batch_select_indices(torch.tensor([1, 0]))
    cache.check_integrity()
