"""What rows carry after a prompt equals sums over full eager attention: causal, padding-aware, at any block size.

Nothing is dropped here (the budget exceeds all tokens), so eager attention over the whole sequence says what every
query paid to every row: in one prompt, in several, and in decode.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from helpers import forward, left_padded, prompt, tiny
from torch import Tensor

import hf_kvpolicy as kv
from hf_kvpolicy.engine import evidence_blocks
from hf_kvpolicy.evidence import gumbel_noise

CLOSE = {"rtol": 1e-5, "atol": 1e-6}
FAMILIES = ("llama", "llama_head_dim", "mistral_window")
GROUPS = ("mean", "max", "sum")
KV_HEADS, QUERY_HEADS, LAYERS = 2, 4, 2
Make = Callable[[Any], Any]


@pytest.fixture(params=[1, 3, 10**6], ids=["one query", "three queries", "whole"])
def block_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Queries scored at once."""
    monkeypatch.setattr(evidence_blocks, "block_queries", lambda *args: request.param)
    return int(request.param)


def eager_attention(family: str, ids: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """Return each layer's attention [B, Q, T, N] from an unattached eager model."""
    positions = None if mask is None else (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        out = tiny(family, "eager")(
            ids, attention_mask=mask, position_ids=positions, output_attentions=True, use_cache=False
        )
    return list(out.attentions)


def grouped(attention_BQTN: Tensor, group: str) -> Tensor:
    """Reduce the query heads of a KV head, per query: [B, H, T, N]."""
    heads = attention_BQTN.unflatten(1, (KV_HEADS, QUERY_HEADS // KV_HEADS))
    return {"mean": heads.mean(2), "sum": heads.sum(2), "max": heads.amax(2)}[group]


def carried(cache: Any, layer: int, batch: int = 0) -> Tensor:
    """Return the states of one batch row's rows in ascending token order, [S, N, X]."""
    snapshot = cache._runtime.snapshot
    table, states = snapshot.full_map(layer), snapshot.scores_LBSWX[layer, batch]
    found = []
    for head in range(states.shape[0]):
        mapped = head if table.map_heads > 1 else 0
        live = table.live_BMW[batch, mapped].nonzero()[:, 0]
        found.append(states[head, live[table.tokens_BMW[batch, mapped][live].argsort()]])
    return torch.stack(found)


def scores(cache: Any, layer: int, batch: int = 0) -> Tensor:
    states = carried(cache, layer, batch)
    return cache._runtime.composition.evidence.scores(states, torch.arange(states.shape[1])[None])


def fed(family: str, make: Make, ids: Tensor, lengths: Sequence[int]) -> Any:
    model = tiny(family)
    cache, start = make(model), 0
    for length in lengths:
        with torch.no_grad():
            forward(model, ids[:, start : start + length], cache)
        start += length
    return cache


# -- cumulative attention ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_cumulative_attention_equals_eager_column_sums(family: str, group: str) -> None:
    ids = prompt(25, seed=4)
    cache = fed(family, lambda model: kv.H2OCache(model, budget=64, group=group), ids, [25])
    for layer, attention in enumerate(eager_attention(family, ids)):
        torch.testing.assert_close(scores(cache, layer), grouped(attention, group)[0].sum(1), **CLOSE)


@pytest.mark.parametrize("lengths", [[25], [12, 13], [1, 24], [10, 1, 1, 1, 12], [3, *[1] * 22], [20, 1, 3, 1]])
@pytest.mark.parametrize("family", FAMILIES)
def test_turns_and_decode_add_to_the_same_sums(family: str, lengths: list[int]) -> None:
    ids = prompt(25, seed=5)
    cache = fed(family, lambda model: kv.H2OCache(model, budget=64, chunked_prefill="bounded"), ids, lengths)
    for layer, attention in enumerate(eager_attention(family, ids)):
        torch.testing.assert_close(scores(cache, layer), grouped(attention, "sum")[0].sum(1), **CLOSE)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("family", FAMILIES)
def test_means_divide_by_the_queries_that_saw_the_row(family: str) -> None:
    ids = prompt(25, seed=6)
    cache = fed(family, lambda model: kv.H2OCache(model, budget=64, normalize=True), ids, [20, 1, 4])
    for layer, attention in enumerate(eager_attention(family, ids)):
        total = grouped(attention, "sum")[0]
        expected = total.sum(1) / (total > 0).sum(1)
        torch.testing.assert_close(scores(cache, layer), expected, **CLOSE)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lengths", [[1, 2, 13], [9, 13, 12]])
def test_pads_pay_and_receive_nothing(family: str, lengths: list[int]) -> None:
    """A left-padded batch: the prompt, one decode token, a second prompt."""
    model, rows, width = tiny(family), len(lengths), max(lengths)
    ids, mask = left_padded([prompt(n + 4, seed=n) for n in lengths], width + 4)
    cache = kv.H2OCache(model, budget=64)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for start, stop in ((0, width), (width, width + 1), (width + 1, width + 4)):
        part = slice(start, stop)
        with torch.no_grad():
            forward(model, ids[:, part], cache, attention_mask=mask[:, :stop], position_ids=positions[:, part])
    for layer, attention in enumerate(eager_attention(family, ids, mask)):
        for row in range(rows):
            real = mask[row].bool()
            expected = grouped(attention, "sum")[row][:, real][:, :, real].sum(1)
            torch.testing.assert_close(scores(cache, layer, row), expected, **CLOSE)
            # One query hands out one unit of attention per query head.
            assert scores(cache, layer, row).sum().item() == pytest.approx(QUERY_HEADS * int(real.sum()), rel=1e-5)


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_compressed_prompt_has_the_output_and_sums_of_eager_attention(family: str) -> None:
    """Rows are dropped, so that output and sums come from one softmax; the rows that stay carry full sums."""
    ids = prompt(25, seed=4)
    with torch.no_grad():
        expected = tiny(family, "eager")(ids, use_cache=False).logits
        model = tiny(family)
        cache = kv.H2OCache(model, budget=8)
        found = forward(model, ids, cache)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    for layer, attention in enumerate(eager_attention(family, ids)):
        table, sums = cache._runtime.snapshot.maps[layer], grouped(attention, "sum")[0].sum(1)
        kept = sums.gather(1, table.tokens_BMW[0].long().expand(KV_HEADS, -1))
        torch.testing.assert_close(cache._runtime.snapshot.scores_LBSWX[layer, 0, :, :, 0], kept, **CLOSE)


def test_sums_do_not_saturate_in_half_precision() -> None:
    """Every query hands out one unit per query head; a bf16 sum would stop growing at 256."""
    model = tiny("llama").bfloat16()
    cache = kv.H2OCache(model, budget=512)
    with torch.no_grad():
        forward(model, prompt(400, seed=2), cache)
    for layer in range(LAYERS):
        assert scores(cache, layer).dtype == torch.float32
        assert scores(cache, layer).sum().item() == pytest.approx(QUERY_HEADS * 400, rel=1e-5)


def test_the_workspace_of_a_long_prompt_is_bounded() -> None:
    """Blocks get smaller as the prompt gets longer, so that logits of one block stay within the workspace."""
    for rows in (64, 4096, 65536):
        queries = evidence_blocks.block_queries(2, 8, rows)
        assert queries >= 1
        assert queries == 1 or queries * 2 * 8 * rows * 4 <= evidence_blocks.WORKSPACE_BYTES


# -- low-score counts -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("history", [1, 7, 8, 9, 20, 400])
@pytest.mark.parametrize("variant", ["paper", "reference"])
def test_low_scores_equal_counts_over_eager_attention(variant: str, history: int, group: str) -> None:
    ids = prompt(25, seed=7)
    options = {"budget": 64, "history": history, "recent": 2, "group": group, "variant": variant}
    for family in ("llama", "mistral_window"):
        cache = fed(family, lambda model: kv.ScissorhandsCache(model, **options), ids, [18, 1, 1, 5])
        for layer, attention in enumerate(eager_attention(family, ids)):
            paid = grouped(attention, group)[0].double()
            low, near = torch.zeros(KV_HEADS, 25), torch.zeros(KV_HEADS, 25)
            for query in range(max(0, 25 - history), 25):
                seen = attention[0, 0, query] > 0
                for head in range(KV_HEADS):
                    visible = paid[head, query][seen]
                    limit = 1 / len(visible) if variant == "paper" else visible.sort().values[int(0.9 * len(visible))]
                    close = (visible / limit - 1).abs() < 1e-5
                    low[head, seen] += visible < limit
                    # One's own uniform share of one row, and the threshold row itself, are no close calls.
                    near[head, seen] += close if int(close.sum()) > (variant == "reference" or len(visible) == 1) else 0
            assert ((-scores(cache, layer) - low).abs() <= near).all()
            assert near.sum() <= 2, "a close call is rare"


@pytest.mark.parametrize("lengths", [[1, 2, 13], [9, 13, 12]])
def test_pads_leave_no_bit(lengths: list[int]) -> None:
    model, width = tiny("llama"), max(lengths)
    ids, mask = left_padded([prompt(n, seed=n) for n in lengths], width)

    def make() -> Any:
        return kv.ScissorhandsCache(model, budget=64, history=6, recent=2)

    batch = make()
    with torch.no_grad():
        forward(model, ids, batch, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
        for row, length in enumerate(lengths):
            alone = make()
            forward(model, ids[row : row + 1, width - length :], alone)
            for layer in range(LAYERS):
                assert torch.equal(carried(batch, layer, row), carried(alone, layer))


# -- Gumbel-softmax ---------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("block_size")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("family", FAMILIES)
def test_gumbel_softmax_equals_noise_on_eager_logits(family: str, group: str) -> None:
    """The logarithm of eager attention is the logits up to a constant per query, which the softmax does not see."""
    ids, lengths = prompt(25, seed=8), [17, 1, 1, 4, 1, 1]
    options = {"budget": 64, "expected_steps": 2, "seed": 9, "group": group}
    cache = fed(family, lambda model: kv.KeyformerCache(model, **options), ids, lengths)
    tau = torch.tensor([1.0] * 17 + [1.5, 2.0] + [1.0] * 4 + [1.5, 2.0])[:, None]
    everything = torch.arange(25)[None]
    for layer, attention in enumerate(eager_attention(family, ids)):
        noise = gumbel_noise(9, layer, QUERY_HEADS, everything, everything[None])
        weights = torch.softmax((attention.log() + noise) / tau, dim=-1)
        torch.testing.assert_close(scores(cache, layer), grouped(weights, group)[0].sum(1), rtol=1e-4, atol=1e-5)
