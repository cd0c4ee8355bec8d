"""At a budget nothing is dropped under, every family equals transformers' own cache, layers of other kinds too."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from helpers import (
    BRIEF,
    CACHE,
    FULL,
    PRUNING,
    dynamic_cache,
    generate,
    left_padded,
    neutral_cache,
    policies,
    prompt,
)
from torch import Tensor

from ._table import FAMILIES, MIXED, NOT_PRUNED, foreign_content, tiny

TOTAL = 64
POLICIES = policies() if FULL else ("snapkv",) if BRIEF else ("snapkv", "streaming_llm", "adakv", "minicache")
LENGTHS = (19, 4, 11)

pytestmark = pytest.mark.filterwarnings("ignore:.*two prompt segments follow:UserWarning")


def _ran(model: Any, cache: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    ids, mask = left_padded([prompt(n, seed=n) for n in LENGTHS])
    out = generate(
        model, ids, cache, 4, attention_mask=mask, return_dict_in_generate=True, output_logits=True, **kwargs
    )
    assert getattr(out, CACHE) is cache
    return out.sequences, torch.stack(out.logits)


def _greedy(model: Any, cache: Any) -> tuple[Tensor, Tensor]:
    return _ran(model, cache)


def _beams(model: Any, cache: Any) -> tuple[Tensor, Tensor]:
    return _ran(model, cache, num_beams=3)


def _chunked(model: Any, cache: Any) -> tuple[Tensor, Tensor]:
    return _ran(model, cache, prefill_chunk_size=5)


def _two_turns(model: Any, cache: Any) -> tuple[Tensor, Tensor]:
    talk = torch.cat([generate(model, prompt(12), cache, 4), prompt(9, seed=5)], dim=1)
    out = generate(model, talk, cache, 4, return_dict_in_generate=True, output_logits=True)
    return out.sequences, torch.stack(out.logits)


DRIVES: dict[str, Callable[[Any, Any], tuple[Tensor, Tensor]]] = {
    "padded": _greedy,
    "beams": _beams,
    "chunked": _chunked,
    "turns": _two_turns,
}


@lru_cache(maxsize=128)
def _stock(family: str, drive: str) -> tuple[Tensor, Tensor, list[Any]]:
    """Return what transformers' own cache gives and holds."""
    model = tiny(family)
    cache = dynamic_cache(model)
    ids, logits = DRIVES[drive](model, cache)
    return ids, logits, [foreign_content(layer) for layer in cache.layers]


PROVES = {
    "padded": ("parity_padded",),
    "beams": ("parity_beams", "parity_padded"),
    "chunked": ("parity_chunked",),
    "turns": ("parity_turns",),
}


@pytest.mark.parametrize(
    "drive", [pytest.param(drive, marks=pytest.mark.proves(*PROVES[drive]), id=drive) for drive in DRIVES]
)
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_transformers_own_cache(family: str, name: str, drive: str) -> None:
    if name in PRUNING and family in NOT_PRUNED:
        pytest.skip("refused; test_refusals.py, test_mixed_layers.py")
    model = tiny(family)
    options: dict[str, Any] = {}
    if name == "streaming_llm":
        options["positions"] = "cache_local" if FAMILIES[family].moves_keys else "original"
    cache = neutral_cache(name, model, TOTAL, **options)
    ids, logits = DRIVES[drive](model, cache)
    wanted_ids, wanted, held = _stock(family, drive)
    assert torch.equal(ids, wanted_ids)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=0)
    cache.check_integrity()
    assert bool(cache.geometry.foreign_layers) == (family in MIXED)
    for layer in cache.geometry.foreign_layers:
        found = foreign_content(cache.layers[layer])
        assert found.keys() == held[layer].keys()
        for part, tensor in found.items():
            torch.testing.assert_close(tensor, held[layer][part], atol=1e-5, rtol=0)
