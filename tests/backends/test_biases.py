"""A bias that differs by head is added to logits, whichever implementation reads the rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.bloom.modeling_bloom import BloomAttention

from hf_kvpolicy import backends
from hf_kvpolicy.engine.evidence_blocks import grouped_logits
from hf_kvpolicy.engine.ragged.attend_one import attend_one
from hf_kvpolicy.ragged_attention import attend_ragged

from ._ragged import ragged_query, ragged_view

SCALING = 0.3


def _biases(lengths: tuple[int, ...], group: int, tokens: int) -> list[Tensor]:
    """Random biases [G, T, n] that hide some rows, and from the second query on never the first one."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for rows in lengths:
        bias = torch.randn(group, tokens, rows, generator=generator)
        hidden = torch.rand(tokens, rows, generator=generator) > 0.6
        hidden[1:, :1] = False
        found.append(bias.masked_fill(hidden, float("-inf")))
    return found


def _plain(query_QTD: Tensor, keys_nD: Tensor, values_nD: Tensor, bias_GTn: Tensor) -> Tensor:
    """One owner in fp64, [T, G, D]; a query that sees nothing gets zeros."""
    output = torch.zeros(query_QTD.shape[1], query_QTD.shape[0], values_nD.shape[1], dtype=torch.float64)
    for q, query_TD in enumerate(query_QTD.double()):
        for t, query_D in enumerate(query_TD):
            weights = (keys_nD.double() @ query_D * SCALING + bias_GTn[q, t].double()).exp()
            if weights.sum() > 0:
                output[t, q] = weights @ values_nD.double() / weights.sum()
    return output


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize(("lengths", "heads"), [((5, 1, 9), 3), ((4, 4, 4, 7, 7, 2), 2), ((0, 3), 1), ((6, 6), 2)])
@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("tokens", [1, 4])
def test_ragged_rows(backend: str, lengths: tuple[int, ...], heads: int, group: int, tokens: int) -> None:
    view = ragged_view(lengths, heads)
    query, biases = ragged_query(view, group, tokens), _biases(lengths, group, tokens)
    found = attend_ragged(backend, query, view, biases, scaling=SCALING)
    together = [found]
    if tokens == 1:
        together.append(attend_one(query, view, biases, SCALING)[0])
    for owner, bias in enumerate(biases):
        row, head = divmod(owner, heads)
        part = slice(head * group, (head + 1) * group)
        wanted = _plain(query[row, part], *view.owner(owner), bias)
        for output in together:
            torch.testing.assert_close(output[row, :, part].double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["sdpa", "eager"])
@pytest.mark.parametrize("group", [1, 2])
@pytest.mark.parametrize("tokens", [1, 5])
def test_rectangles(backend: str, group: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "MASK_BLOCK_ELEMENTS", 20)
    query, keys = torch.randn(2, 3 * group, tokens, 8), torch.randn(2, 3, 7, 8)
    values, bias = torch.randn(2, 3, 7, 6), torch.stack(_biases((7, 7), 3 * group, tokens))
    module = torch.nn.Module()
    module.__class__ = type("Attention", (torch.nn.Module,), {"__module__": BloomAttention.__module__})
    found = backends.attend_view(backend, module, query, keys, values, bias, {"scaling": SCALING})
    logits = grouped_logits(query, keys, bias, SCALING)
    for row in range(2):
        for head in range(3):
            part = slice(head * group, (head + 1) * group)
            wanted = _plain(query[row, part], keys[row, head], values[row, head], bias[row, part])
            sees = (bias[row, part] > float("-inf")).any(-1).T
            torch.testing.assert_close(found[row, :, part][sees].double(), wanted[sees], atol=1e-5, rtol=1e-5)
            assert found.isfinite().all()
            weights = logits[row, head].softmax(-1) @ values[row, head]
            torch.testing.assert_close(weights.transpose(0, 1)[sees].double(), wanted[sees], atol=1e-5, rtol=1e-5)
