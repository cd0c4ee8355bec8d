"""From scores, protection and budgets to rows that stay: against the plain reference, ties first."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.errors import SelectionError
from hf_kvpolicy.selection import keep_best, keep_best_reference, kept_index, reduce_heads

Owner = tuple[list[float], list[bool], list[bool]]


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[Owner]], list[int]]:
    """Batch rows x heads of (scores with many ties, open rows, protected rows), and a budget per batch row."""
    rows = draw(st.integers(1, 24))
    values = draw(st.sampled_from([[0.0], [0.0, 1.0], [0.25, 0.5, 0.75, -1.0, 1e30, -1e30]]))
    batch = []
    for _ in range(draw(st.integers(1, 3))):
        flags = st.lists(st.booleans(), min_size=rows, max_size=rows)
        is_open = draw(flags) if draw(st.booleans()) else [True] * rows
        row = [
            (draw(st.lists(st.sampled_from(values), min_size=rows, max_size=rows)), is_open, draw(flags))
            for _ in range(draw(st.shared(st.integers(1, 3), key="heads")))
        ]
        batch.append(row)
    return batch, [draw(st.integers(1, rows + 1)) for _ in batch]


def stacked(batch: list[list[Owner]], part: int) -> torch.Tensor:
    return torch.tensor([[owner[part] for owner in row] for row in batch])


@given(problems())
@settings(deadline=None, max_examples=250, derandomize=True)
def test_keeps_what_the_reference_keeps(problem: tuple[list[list[Owner]], list[int]]) -> None:
    batch, budgets = problem
    keep = keep_best(stacked(batch, 0), stacked(batch, 1), stacked(batch, 2), budgets)
    for row, budget, kept_row in zip(batch, budgets, keep, strict=True):
        for (scores, is_open, protected), kept in zip(row, kept_row, strict=True):
            expected = keep_best_reference(scores, is_open, protected, budget)
            assert kept.nonzero()[:, 0].tolist() == expected
            must = [i for i, flag in enumerate(protected) if flag and is_open[i]]
            assert set(must) <= set(expected)
            assert len(expected) == max(len(must), min(budget, sum(is_open)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.int64])
@pytest.mark.parametrize("rows", [1, 2, 7, 300])
def test_equal_scores_keep_the_lower_positions(rows: int, dtype: torch.dtype) -> None:
    scores = torch.full((1, 2, rows), 3, dtype=dtype)
    everything = torch.ones(1, 2, rows, dtype=torch.bool)
    for budget in {1, max(1, rows // 2), rows, rows + 1}:
        keep = keep_best(scores, everything, ~everything, [budget])
        assert keep.tolist() == [[[i < budget for i in range(rows)]] * 2]


def test_integer_scores_are_compared_exactly() -> None:
    scores = torch.tensor([2**24, 2**24 + 1, 2**24 + 2], dtype=torch.int32).view(1, 1, 3)
    everything = torch.ones(1, 1, 3, dtype=torch.bool)
    assert keep_best(scores, everything, ~everything, [1]).tolist() == [[[False, False, True]]]


def test_a_protected_row_stays_whatever_its_score_and_a_closed_one_never_does() -> None:
    scores = torch.tensor([[[5.0, -1e30, 4.0, 9.0]]])
    is_open = torch.tensor([[[True, True, True, False]]])
    protected = torch.tensor([[[False, True, False, True]]])
    assert keep_best(scores, is_open, protected, [2]).tolist() == [[[True, True, False, False]]]


@given(problems())
@settings(deadline=None, max_examples=100, derandomize=True)
def test_gather_indices_are_the_kept_rows_in_order(problem: tuple[list[list[Owner]], list[int]]) -> None:
    batch, budgets = problem
    batch = [[(scores, is_open, [False] * len(scores)) for scores, is_open, _ in row] for row in batch]
    keep = keep_best(stacked(batch, 0), stacked(batch, 1), stacked(batch, 2), budgets)
    counts = [min(budget, sum(row[0][1])) for row, budget in zip(batch, budgets, strict=True)]
    kept = kept_index(keep, counts)
    assert kept.index_BMK.shape == kept.live_BMK.shape == (*keep.shape[:2], max(counts))
    for row, count in enumerate(counts):
        for head in range(keep.shape[1]):
            live = kept.live_BMK[row, head].tolist()
            assert live == [slot < count for slot in range(max(counts))]
            assert kept.index_BMK[row, head, :count].tolist() == keep[row, head].nonzero()[:, 0].tolist()
    assert ((kept.index_BMK >= 0) & (kept.index_BMK < keep.shape[2])).all(), "dead slots must gather something real"


def test_counts_must_cover_the_batch() -> None:
    with pytest.raises(SelectionError, match="batch row"):
        kept_index(torch.ones(2, 1, 3, dtype=torch.bool), [3])


def test_units_sum_heads() -> None:
    votes = torch.tensor([[[1.0, 2.0, 0.0], [3.0, 0.0, 0.0]]])
    assert reduce_heads(votes, "head") is votes
    for unit in ("layer", "token"):
        assert reduce_heads(votes, unit).tolist() == [[[4.0, 2.0, 0.0]]]
