"""Worked examples of 0x06: three selectors on one fixture, temperature, score identity, bytes.

Two tables of the specification are lost. H2O's attention over five rows is chosen here. Keyformer's decode logits
follow from the printed numbers: y0, y2, y3 from the step contributions, {y4, y5} = {1.1, 0.6} from the differences at
three temperatures. Of its prompt only f(0), f(2), f(3) are printed; the logits here give them, and f(1) < f(0).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from reference import h2o, keyformer, scissorhands
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.contract import full_payload_bytes, row_bytes, score_state_bytes
from hf_kvpolicy.evidence import CumulativeAttention, GumbelSoftmax, LowScoreHistory, QueryBlock, gumbel, gumbel_noise
from hf_kvpolicy.selection import keep_best, kept_index

from ._models import feed, kept, tokens

BUDGET, RECENT = 4, 2
# Queries 3, 4, 5 of six rows. Each row is low both below 1/6, as printed, and below the uniform share of its own query.
HISTORY = [[0.10, 0.50, 0.26, 0.14], [0.05, 0.40, 0.10, 0.23, 0.22], [0.05, 0.45, 0.30, 0.08, 0.06, 0.06]]
LOW_COUNTS = [3, 0, 1, 2, 1, 1]
H2O_SCORES, H2O_ATTENTION = [0.4, 0.3, 0.2, 0.1], [0.05, 0.10, 0.45, 0.10, 0.30]
PROMPT_Y = [0.0, -0.2, 0.0, -0.7, -0.1]
DECODE_ROWS, DECODE_Y = [0, 2, 3, 4, 5], [0.5, 0.1, 1.5, 1.1, 0.6]
KEYFORMER = {"seed": 0, "tau_init": 1.0, "tau_end": 2.0, "expected_steps": 2}
PRINTED = {"abs": 5e-5}


def block(logits: Sequence[Sequence[float]], query: int, rows: Sequence[int], clock: int = 0) -> QueryBlock:
    """Return queries from position `query` on, one KV head, one query head; short rows of logits are causal."""
    width = len(rows)
    padded = torch.tensor([[*row, *[-math.inf] * (width - len(row))] for row in logits], dtype=torch.float32)
    at = torch.arange(query, query + len(logits))[None]
    return QueryBlock(
        layer=0, logits_BSGTN=padded[None, None, None], query_tokens_BT=at, row_tokens_BMN=torch.tensor([[list(rows)]]),
        real_BT=None, clock_BT=torch.full_like(at, clock), dtype=torch.float32,
    )  # fmt: skip


def select(scores: Tensor, rows: Sequence[int], drop: int | None = None, newest_wins: bool = False) -> list[int]:
    """Return the positions that the library's selection keeps: two recent rows and the best others."""
    open_rows = torch.ones(1, 1, len(rows), dtype=torch.bool)
    recent = torch.arange(len(rows))[None, None] >= len(rows) - RECENT
    count = len(rows) - drop if drop else BUDGET
    keep = keep_best(scores.view(1, 1, -1), open_rows, recent, [count], keeps_newest_on_ties=newest_wins)
    return [rows[i] for i in kept_index(keep, [count]).index_BMK[0, 0].tolist()]


# -- Scissorhands -----------------------------------------------------------------------------------------------------


def test_scissorhands_counts_and_publishes() -> None:
    logs = [[math.log(a) for a in row] for row in HISTORY]
    evidence = LowScoreHistory(history=3)
    state = torch.zeros(1, 1, 6, evidence.channels, dtype=evidence.dtype)
    evidence.observe_(state, block(logs, 3, range(6)), "mean")
    scores = evidence.scores(state, torch.arange(6)[None, None])
    assert (-scores[0, 0]).tolist() == LOW_COUNTS
    assert select(scores, range(6), drop=2, newest_wins=evidence.keeps_newest_on_ties) == [1, 2, 4, 5]


@pytest.mark.parametrize("common_threshold", [True, False])
def test_scissorhands_on_the_oracle(common_threshold: bool) -> None:
    """The printed threshold is 1/6 for every query; the library's is each query's own share. Both give the counts."""
    bits = [
        {t: int(a < (1 / 6 if common_threshold else scissorhands.threshold(row, "paper"))) for t, a in enumerate(row)}
        for row in HISTORY
    ]
    counts = scissorhands.low_counts(bits, range(6))
    assert list(counts.values()) == LOW_COUNTS
    assert scissorhands.remaining(range(6), counts, [4, 5], BUDGET, drop_rows=2) == [1, 2, 4, 5]


def test_scissorhands_protects_the_recent_rows_not_the_prefix() -> None:
    """0x06D: the printed slice would zero the historical counts and drop recent rows."""
    counts = dict(enumerate([3, 0, 1, 2, 9, 9]))
    assert scissorhands.remaining(range(6), counts, [4, 5], BUDGET, drop_rows=2) == [1, 2, 4, 5]
    assert select(-torch.tensor(list(counts.values())).float(), range(6), drop=2, newest_wins=True) == [1, 2, 4, 5]


def test_scissorhands_drops_the_lower_position_of_equal_counts() -> None:
    counts = dict(enumerate([1, 1, 1, 1, 0, 0]))
    assert scissorhands.remaining(range(6), counts, [4, 5], BUDGET, drop_rows=2) == [2, 3, 4, 5]
    assert select(-torch.tensor(list(counts.values())).float(), range(6), drop=2, newest_wins=True) == [2, 3, 4, 5]


def test_old_queries_leave_the_history() -> None:
    """Three more queries to which nothing is low but position 1."""
    evidence = LowScoreHistory(history=3)
    state = torch.zeros(1, 1, 6, evidence.channels, dtype=evidence.dtype)
    evidence.observe_(state, block([[math.log(a) for a in row] for row in HISTORY], 3, range(6)), "mean")
    for query, expected in ((6, [2, 1, 1, 1, 1, 1]), (7, [1, 2, 0, 1, 1, 1]), (8, [0, 3, 0, 0, 0, 0])):
        later = [[math.log(a) for a in (0.19, 0.05, 0.19, 0.19, 0.19, 0.19)]]
        evidence.observe_(state, block(later, query, range(6)), "mean")
        assert (-evidence.scores(state, torch.arange(6)[None, None])[0, 0]).tolist() == expected


# -- H2O --------------------------------------------------------------------------------------------------------------


def test_h2o_attends_before_it_selects() -> None:
    """The parent's scores alone would drop position 2, as would the newest row without its first attention."""
    evidence = CumulativeAttention()
    state = torch.tensor([*H2O_SCORES, 0.0]).view(1, 1, 5, 1)
    assert select(evidence.scores(state, torch.arange(5)[None, None]), range(5)) == [0, 1, 3, 4]
    evidence.observe_(state, block([[math.log(a) for a in H2O_ATTENTION]], 4, range(5)), "sum")
    assert state[0, 0, :, 0].tolist() == pytest.approx([0.45, 0.40, 0.65, 0.20, 0.30])
    assert select(evidence.scores(state, torch.arange(5)[None, None]), range(5)) == [0, 2, 3, 4]
    summed = {t: a + b for t, (a, b) in enumerate(zip([*H2O_SCORES, 0.0], H2O_ATTENTION, strict=True))}
    assert h2o.best(range(5), summed, [3, 4], BUDGET) == [0, 2, 3, 4]


@pytest.mark.parametrize("rounds", [False, True])
def test_the_released_code_rounds_probabilities_before_it_sums_them(rounds: bool) -> None:
    evidence = CumulativeAttention(rounds_to_model_dtype=rounds)
    logits = torch.randn(300, 40, generator=torch.Generator().manual_seed(0))
    state = torch.zeros(1, 1, 40, 1)
    evidence.observe_(state, replace(block(logits.tolist(), 39, range(40)), dtype=torch.bfloat16), "sum")
    paid = torch.softmax(logits, dim=-1)
    expected = (paid.bfloat16().float() if rounds else paid).sum(0)
    torch.testing.assert_close(state[0, 0, :, 0], expected)
    assert torch.equal(state[0, 0, :, 0].bfloat16().float(), state[0, 0, :, 0]) is False, "the sum itself is fp32"


def test_h2o_keeps_the_lower_position_of_equal_scores() -> None:
    scores = torch.tensor([0.3, 0.4, 0.3, 0.0, 0.0])
    assert select(scores, range(5)) == [0, 1, 3, 4] == h2o.best(range(5), dict(enumerate(scores.tolist())), [3, 4], 4)


# -- Keyformer --------------------------------------------------------------------------------------------------------


def contributions(tau: float) -> dict[int, float]:
    """Return what one step adds at a temperature, on the oracle's softmax."""
    return dict(zip(DECODE_ROWS, h2o.softmax(np.array(DECODE_Y) / tau), strict=True))


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fixture's logits y include their noise."""
    monkeypatch.setattr(gumbel, "gumbel_noise", lambda *args: torch.zeros_like(gumbel_noise(*args)))


@pytest.mark.usefixtures("silent")
def test_keyformer_prompt_and_decode() -> None:
    evidence = GumbelSoftmax(**KEYFORMER)
    state = torch.zeros(1, 1, 5, 1)
    # The prompt's last query; earlier ones would add more, which the fixture does not have.
    evidence.observe_(state, block([PROMPT_Y], 4, range(5)), "sum")
    prompt = state[0, 0, :, 0].tolist()
    assert [prompt[i] for i in (0, 2, 3)] == pytest.approx([0.2370, 0.2370, 0.1177], **PRINTED)
    assert prompt == pytest.approx(h2o.softmax(np.array(PROMPT_Y)).tolist())
    assert select(state, range(5)) == [0, 2, 3, 4]

    state = torch.cat([state[:, :, [0, 2, 3, 4]], torch.zeros(1, 1, 1, 1)], dim=2)
    evidence.observe_(state, block([DECODE_Y], 5, DECODE_ROWS, clock=1), "sum")
    after = dict(zip(DECODE_ROWS, state[0, 0, :, 0].tolist(), strict=True))
    assert [after[3], after[2]] == pytest.approx([0.4281, 0.3590], abs=1e-4)
    assert select(state, DECODE_ROWS) == [0, 3, 4, 5]
    assert h2o.best(DECODE_ROWS, after, [4, 5], BUDGET) == [0, 3, 4, 5]
    # The contract of 0x06H: cumulative odds are no exponential, and lie between the odds carried in and the step's.
    assert after[3] / after[2] == pytest.approx(1.192, abs=1e-3)
    assert after[3] / after[2] / math.exp(1.4 / 1.5) == pytest.approx(0.469, abs=1e-3)
    assert after[0] / after[2] / math.exp(0.4 / 1.5) == pytest.approx(0.846, abs=1e-3)
    assert prompt[3] / prompt[2] == pytest.approx(0.497, abs=1e-3)


def test_keyformer_step_contributions() -> None:
    step = contributions(1.5)
    assert [step[3], step[2]] == pytest.approx([0.3104, 0.1221], **PRINTED)
    assert step[3] / step[2] == pytest.approx(math.exp(1.4 / 1.5)) == pytest.approx(2.543, abs=1e-3)


@pytest.mark.parametrize(("tau", "change"), [(1.0, 0.2799), (1.5, 0.1884), (2.0, 0.1414)])
def test_a_step_changes_the_gap_less_when_it_is_warmer(tau: float, change: float) -> None:
    step = contributions(tau)
    assert step[3] - step[2] == pytest.approx(change, abs=1e-4)


def test_temperature_follows_its_schedule() -> None:
    fixture = GumbelSoftmax(**KEYFORMER)
    assert fixture.temperature(torch.tensor([0, 1, 2, 3])).tolist() == [1.0, 1.5, 2.0, 2.0]
    for after_end, last in (("clamp", 2.0), ("continue", 2.5)):
        evidence = GumbelSoftmax(seed=0, tau_init=1.0, tau_end=2.0, expected_steps=100, after_end=after_end)
        steps = [0, 1, 50, 100, 150]
        expected = [keyformer.temperature(s, 1.0, 2.0, 100, after_end) for s in steps]
        assert expected == pytest.approx([1.0, 1.01, 1.5, 2.0, last])
        assert evidence.temperature(torch.tensor(steps)).tolist() == pytest.approx(expected)


# -- noise ------------------------------------------------------------------------------------------------------------


def noise(seed: int = 0, layer: int = 0, heads: int = 4, queries: Sequence[int] = range(64), batch: int = 1) -> Tensor:
    query_tokens = torch.tensor(list(queries)).repeat(batch, 1)
    return gumbel_noise(seed, layer, heads, query_tokens, torch.arange(512).repeat(batch, 1, 1))


def test_noise_is_standard_gumbel() -> None:
    drawn = noise().double()
    assert drawn.shape == (1, 4, 64, 512)
    assert noise().dtype == torch.float32
    assert torch.isfinite(drawn).all()
    assert drawn.mean().item() == pytest.approx(0.5772157, abs=0.015)
    assert drawn.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    for point in (-1.0, 0.0, 1.0, 3.0):
        assert (drawn < point).double().mean().item() == pytest.approx(math.exp(-math.exp(-point)), abs=0.01)


def test_noise_repeats_and_knows_no_batch() -> None:
    one, many = noise(), noise(batch=3)
    assert torch.equal(one, noise())
    assert all(torch.equal(row, one[0]) for row in many)
    # A query or a row draws the same value in whatever company it comes, held rows per KV head included.
    rows = torch.tensor([[[3, 9, 200], [0, 9, 511]]])
    part = gumbel_noise(0, 0, 4, torch.tensor([[7, 40]]), rows)
    for head in range(4):
        assert torch.equal(part[0, head], one[0, head][[7, 40]][:, rows[0, head // 2]])


def test_noise_differs_by_seed_layer_head_query_and_key() -> None:
    one = noise()
    centred = (one - one.mean()) / one.std()
    others = [noise(seed=1), noise(seed=2**31 + 5), noise(layer=1), noise(queries=range(64, 128))]
    others += [one.roll(1, dims=axis) for axis in (1, 2, 3)]
    for number, other in enumerate(others):
        assert abs((centred * (other - other.mean()) / other.std()).mean().item()) < 0.015, number
    # The noise of (query, key) is not that of (key, query).
    square = centred[:, :, :, :64]
    assert abs((square * square.transpose(2, 3)).mean().item()) < 0.05
    assert one.unique().numel() > 0.99 * one.numel()


# -- 0x06J ------------------------------------------------------------------------------------------------------------


def test_scores_are_gathered_in_packed_coordinates() -> None:
    """[0, 2, 3, 4, 5] -> [0, 3, 4, 5] gathers [0, 2, 3, 4]."""
    keep = torch.tensor([[[row in (0, 3, 4, 5) for row in DECODE_ROWS]]])
    assert kept_index(keep, [4]).index_BMK.tolist() == [[[0, 2, 3, 4]]]


def test_bytes_of_the_fixture() -> None:
    row = row_bytes(head_dim_k=4, head_dim_v=4, key_scalar_bytes=2, value_scalar_bytes=2)
    assert row == 16
    sizes = [full_payload_bytes(layers=1, kv_heads=1, tokens=rows, bytes_per_row=row) for rows in (6, 4, 5)]
    assert sizes == [96, 64, 80]
    assert score_state_bytes([4]) == 16


@pytest.mark.parametrize("policy", ["h2o", "keyformer", "scissorhands"])
def test_bytes_of_the_fixture_on_the_engine(policy: str) -> None:
    """One layer, one KV head, d = 4, bf16: a six-row prompt published as four rows (two after a batch drop)."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        num_key_value_heads=1, head_dim=4, initializer_range=0.5,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval().to(torch.bfloat16)
    options = {"recent": RECENT, "history": 3, "drop_ratio": 0.5} if policy == "scissorhands" else {"recent_ratio": 0.5}
    cache = kv.make_cache(policy, model, budget=BUDGET, **options)
    feed(model, cache, tokens(6))
    assert cache.ledger().full_payload_bytes == 96
    assert cache.ledger().payload_bytes == 64
    assert cache.ledger().scores_bytes >= (4 if policy == "scissorhands" else 16)
    assert kept(cache)[0][0][-RECENT:] == [4, 5]
    feed(model, cache, tokens(1, seed=2))
    rows = 3 if policy == "scissorhands" else 4
    assert cache.ledger().payload_bytes == 16 * rows
    assert kept(cache)[0][0][-RECENT:] == [5, 6]
    cache.check_integrity()
