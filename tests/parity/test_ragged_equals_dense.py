"""Where every owner holds equally many rows, ragged storage gives what dense storage gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers import BACKENDS, FAMILIES, forward, kept_positions, left_padded, prompt, tiny

import hf_kvpolicy as kv
from hf_kvpolicy.errors import ManifestError

CASES: list[tuple[str, dict[str, Any]]] = [
    ("snapkv", {"budget": 8, "window": 3, "kernel_size": 3}),
    ("snapkv", {"budget": 8, "window": 3, "unit": "layer", "group": "max"}),
    ("snapkv", {"budget": 8, "window": 3, "owner": "query_head"}),
    ("snapkv", {"budget": 0.4, "window": 3, "protect": [0, 5]}),
    ("snapkv", {"budget": 8, "window": 3, "on_append": "append"}),
    ("snapkv", {"budget": 8, "window": 3, "chunked_prefill": "hold"}),
    ("random", {"budget": 8, "window": 3}),
]


def pair(case: tuple[str, dict[str, Any]], model: Any) -> tuple[Any, Any]:
    dense = kv.make_cache(case[0], model, **case[1])
    return dense, kv.PolicyCache(model, replace(dense.composition, storage="ragged"))


@pytest.mark.proves("ragged")
@pytest.mark.filterwarnings("ignore:.*two prompt segments follow.*")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join([case[0], *(f"{k}={v}" for k, v in case[1].items())]))
def test_the_same_rows_and_logits(case: Any, family: str, backend: str) -> None:
    """Padded prompt, decode, a second segment, decode, a recorded draft that is cut, decode."""
    model = tiny(family, backend)
    caches = pair(case, model)
    ids, mask = left_padded([prompt(n, n) for n in (19, 11, 30)])
    new = [ids, prompt(1, 1, 3), prompt(1, 2, 3), prompt(7, 3, 3), prompt(1, 4, 3), prompt(5, 5, 3), prompt(1, 6, 3)]
    for step, fed in enumerate(new):
        if step:
            mask = torch.cat([mask, torch.ones(3, fed.shape[1], dtype=mask.dtype)], dim=1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)[:, -fed.shape[1] :]
        for cache in caches:
            if step == 5:
                cache.activate_past_recording()
        with torch.no_grad():
            want, got = (forward(model, fed, c, attention_mask=mask, position_ids=positions) for c in caches)
        real = mask[:, -fed.shape[1] :].bool()
        torch.testing.assert_close(got[real], want[real], atol=1e-5, rtol=1e-4)
        if step == 5:
            for cache in caches:
                cache.crop(-2)
            mask = mask[:, :-2]
        for row in range(3):
            assert kept_positions(caches[1], row) == kept_positions(caches[0], row), f"step {step}"
        caches[1].check_integrity()
    assert caches[1].stored_rows(0).tolist() == caches[0].stored_rows(0).tolist()
    assert caches[1].ledger().payload_bytes == caches[0].ledger().payload_bytes


REFUSED = pytest.mark.proves("ragged", family="llama", refused=True)


@pytest.mark.parametrize(
    ("name", "options", "word"),
    [
        ("snapkv", {"budget": 8, "window": 3, "unit": "token"}, "unit='token'"),
        pytest.param("sliding_window", {"budget": 8}, "position-only", marks=REFUSED),
        pytest.param("streaming_llm", {"budget": 8}, "cache-local", marks=REFUSED),
        pytest.param("h2o", {"budget": 8}, "carried scores", marks=REFUSED),
    ],
)
def test_what_ragged_storage_cannot_hold_is_refused(name: str, options: dict[str, Any], word: str) -> None:
    dense = kv.make_cache(name, tiny("llama"), **options)
    with pytest.raises(ManifestError, match=word):
        replace(dense.composition, storage="ragged")
