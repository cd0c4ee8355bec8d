"""Capped logits and attention sinks, written out, against every path that attends over a view or scores its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_kvpolicy import backends
from hf_kvpolicy.engine.evidence_blocks import attend_with_logits
from hf_kvpolicy.engine.ragged.attend_one import attend_one
from hf_kvpolicy.ragged_attention import attend_ragged
from hf_kvpolicy.weighting import PLAIN, Weighting

from ._ragged import ragged_query, ragged_view

SCALING = 0.4
SINKS = torch.tensor([0.7, -1.3, 2.0, 0.1])
WEIGHTINGS = {
    "plain": PLAIN,
    "capped": Weighting(softcap=1.5),
    "sinks": Weighting(sinks_Q=SINKS),
    "both": Weighting(softcap=1.5, sinks_Q=SINKS),
}


def written_out(
    query_TD: Tensor, keys_ND: Tensor, values_ND: Tensor, seen: Tensor, weighting: Weighting, head: int
) -> Any:
    """Output and weights of one query head, query by query."""
    outputs, weights = [], []
    for query, row in zip(query_TD, seen, strict=True):
        logits = keys_ND @ query * SCALING
        if weighting.softcap is not None:
            logits = weighting.softcap * torch.tanh(logits / weighting.softcap)
        terms = logits.exp() * row
        total = terms.sum() + (0.0 if weighting.sinks_Q is None else weighting.sinks_Q[head].exp())
        weights.append(terms / total)
        outputs.append(weights[-1] @ values_ND)
    return torch.stack(outputs), torch.stack(weights)


@pytest.fixture(params=WEIGHTINGS)
def weighting(request: pytest.FixtureRequest) -> Weighting:
    return WEIGHTINGS[request.param]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("stored", [2, 4], ids=["kv_heads", "query_heads"])
@pytest.mark.parametrize("backend", ["flex_attention", "eager"])
def test_views_with_a_mask(weighting: Weighting, backend: str, stored: int, tokens: int) -> None:
    """What backends fall back to where their own function does not fit: a mask, or rows that query heads own."""
    if backend == "eager" and stored == 2:
        pytest.skip("the family's own function runs; tests/families compares it")
    query, keys, values = torch.randn(2, 4, tokens, 8), torch.randn(2, stored, 9, 8), torch.randn(2, stored, 9, 8)
    mask = torch.rand(2, stored, tokens, 9) > 0.3
    mask[..., 0] = True
    told = {"softcap": weighting.softcap, "s_aux": weighting.sinks_Q}
    module: Any = SimpleNamespace(num_key_value_groups=2)
    found = backends.attend_view(backend, module, query, keys, values, mask, {"scaling": SCALING, **told})
    for row in range(2):
        for head in range(4):
            own = head * stored // 4
            wanted, _ = written_out(
                query[row, head], keys[row, own], values[row, own], mask[row, own].float(), weighting, head
            )
            torch.testing.assert_close(found[row, :, head], wanted, atol=1e-5, rtol=0)


def test_one_query_with_its_weights(weighting: Weighting) -> None:
    query, keys, values = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    output, _, attention = attend_with_logits(query, keys, values, None, SCALING, weighting)
    for row in range(2):
        for head in range(4):
            wanted, weights = written_out(
                query[row, head], keys[row, head // 2], values[row, head // 2], torch.ones(1, 9), weighting, head
            )
            torch.testing.assert_close(output[row, :, head], wanted, atol=1e-5, rtol=0)
            torch.testing.assert_close(attention[row, head // 2, head % 2], weights, atol=1e-5, rtol=0)


@pytest.mark.parametrize("lengths", [(5, 3, 5, 5, 3, 1, 5, 5), (4,) * 8], ids=["ragged", "rectangle"])
@pytest.mark.parametrize("path", ["eager", "sdpa", "one"])
def test_owners_of_unequal_length(weighting: Weighting, path: str, lengths: tuple[int, ...]) -> None:
    view = ragged_view(lengths, heads=2)
    query = ragged_query(view, 2, 1)
    if path == "one":
        found = attend_one(query, view, None, SCALING, weighting)[0]
    else:
        found = attend_ragged(path, query, view, None, scaling=SCALING, weighting=weighting)
    for owner, rows in enumerate(lengths):
        keys, values = view.owner(owner)
        batch, head = divmod(owner, 2)
        for each in range(2):
            number = head * 2 + each
            wanted, _ = written_out(query[batch, number], keys, values, torch.ones(1, rows), weighting, number)
            torch.testing.assert_close(found[batch, :, number], wanted, atol=1e-5, rtol=0)
