"""What evaluations do with families that attend themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import prompt

import hf_kvpolicy as kv
from hf_kvpolicy.eval.calibration.attention import Reader
from hf_kvpolicy.eval.dense_prompts import DensePrompts

from ._alibi_models import KINDS, attached, model_of


@pytest.mark.parametrize("name", KINDS)
def test_every_cache_runs_its_own_prompt(name: str) -> None:
    model, ids = attached(name), tuple(prompt(20)[0].tolist())
    encoded: Any = SimpleNamespace(segments=(ids,))
    shared, alone = (
        DensePrompts(model, share=share).prefill(encoded, kv.SnapKVCache(model, budget=8, window=3))
        for share in (True, False)
    )
    assert torch.equal(shared.next_logits, alone.next_logits)


def test_attention_is_read_only_where_the_model_gives_it() -> None:
    ids = prompt(20)[0].tolist()
    _, attention = Reader(model_of("mpt"), ids[:15]).feed(ids[15:])
    assert attention.shape == (2, 4, 5, 20)
    with pytest.raises(kv.UnsupportedModelError, match='attn_implementation="eager"'):
        Reader(model_of("falcon"), ids[:15]).feed(ids[15:])
