"""Merging tokens into segments: the trace of the specification, the closed form, and what decides."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from reference import dmc as plain
from torch import Tensor

from hf_kvpolicy.contract import check_segments
from hf_kvpolicy.representation.token_segments import TokenSegments, partial_means

ALPHA, OMEGA = [0, 1, 0, 1, 1], [1.0, 1.0, 2.0, 1.0, 1.0]
KEYS = [[1.0, 0.0], [3.0, 2.0], [5.0, 4.0], [7.0, 6.0], [9.0, 8.0]]
VALUES = [[10.0, 0.0], [30.0, 20.0], [50.0, 40.0], [70.0, 60.0], [90.0, 80.0]]


def rule(**changes: Any) -> TokenSegments:
    made: dict[str, Any] = {"channel": 0, "offset": 0.0, "ratio": 2.0, **changes}
    return TokenSegments(name="merged_segments", replaces_rows=True, **made)


def states(alphas: list[int], omegas: list[float], rows: Tensor) -> tuple[Tensor, Tensor]:
    """The state after every token of one owner, from nothing."""
    before = torch.zeros(1, 1, 1, rows.shape[1], dtype=rows.dtype)
    weights = torch.tensor([[[0.0, *omegas]]], dtype=rows.dtype)
    begins = torch.tensor([[[True, *(not a or not t for t, a in enumerate(alphas))]]])
    means, masses = partial_means(torch.cat([before, rows[None, None]], dim=2), weights, begins)
    return means[0, 0, 1:], masses[0, 0, 1:]


def ends_of(alphas: list[int]) -> list[int]:
    return [t for t in range(len(alphas)) if t + 1 == len(alphas) or not alphas[t + 1]]


def test_five_rows_become_two_segments() -> None:
    """The trace of 0x0CC, by the reference and by the library."""
    found = plain.segments_of(ALPHA, OMEGA, KEYS, VALUES)
    expected = [((0, 1), 2.0, [2.0, 1.0], [20.0, 10.0]), ((2, 4), 4.0, [6.5, 5.5], [65.0, 55.0])]
    assert [(each.span, each.mass, each.key, each.value) for each in found] == expected
    assert [each.anchor for each in found] == [1, 4]
    means, masses = states(ALPHA, OMEGA, torch.cat([torch.tensor(KEYS), torch.tensor(VALUES)], dim=1))
    assert ends_of(ALPHA) == [1, 4]
    assert means[[1, 4]].tolist() == [[2.0, 1.0, 20.0, 10.0], [6.5, 5.5, 65.0, 55.0]]
    assert masses[[1, 4]].tolist() == [2.0, 4.0]
    check_segments(ALPHA, OMEGA, [each.span for each in found], masses[[1, 4]].tolist())


def test_merged_rows_are_weighted_means_over_a_thousand_random_segmentations() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        length, share = draw.randint(1, 40), draw.random()
        alphas = [int(draw.random() < share) for _ in range(length)]
        omegas = [draw.uniform(1e-3, 1.0) for _ in range(length)]
        rows = [[draw.gauss(0, 1) for _ in range(3)] for _ in range(length)]
        means, masses = states(alphas, omegas, torch.tensor(rows))
        segments = plain.segments_of(alphas, omegas, rows, rows)
        assert len(segments) == len(ends_of(alphas)) == sum(not a or not t for t, a in enumerate(alphas))
        for end, segment in zip(ends_of(alphas), segments, strict=True):
            expected = torch.tensor(plain.closed_form(omegas, rows, segment.span))
            torch.testing.assert_close(means[end], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(torch.tensor(segment.key), expected, atol=1e-5, rtol=1e-5)
            assert float(masses[end]) == pytest.approx(segment.mass, rel=1e-5)


def test_many_owners_at_once_are_each_alone_and_piece_by_piece_is_the_same_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 3, 31, 5, generator=generator)
    weights = torch.rand(2, 3, 31, generator=generator)
    begins = torch.rand(2, 3, 31, generator=generator) < 0.3
    begins[:, :, 0] = True
    means, masses = partial_means(rows, weights, begins)
    for cut in (1, 7, 30):
        left = partial_means(rows[:, :, :cut], weights[:, :, :cut], begins[:, :, :cut])
        carried = torch.cat([left[0][:, :, -1:], rows[:, :, cut:]], dim=2)
        mass = torch.cat([left[1][:, :, -1:], weights[:, :, cut:]], dim=2)
        right = partial_means(carried, mass, begins[:, :, cut - 1 :].clone())
        assert torch.equal(torch.cat([left[0], right[0][:, :, 1:]], dim=2), means)
        assert torch.equal(torch.cat([left[1], right[1][:, :, 1:]], dim=2), masses)
    for batch in range(2):
        for head in range(3):
            one = partial_means(*(part[batch : batch + 1, head : head + 1] for part in (rows, weights, begins)))
            assert torch.equal(one[0][0, 0], means[batch, head])


def test_pads_leave_segments_as_they_are_and_are_not_counted() -> None:
    """Before the first token, between and behind; compared with the same tokens without them, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    rows, weights = torch.randn(2, 3, 20, 4, generator=generator), torch.rand(2, 3, 20, generator=generator)
    begins = torch.rand(2, 3, 20, generator=generator) < 0.4
    live = torch.rand(2, 20, generator=generator) < 0.6
    live[:, 0], live[0, 1:6], live[1, 14:] = True, False, False
    begins &= live[:, None]
    means, masses = partial_means(rows, weights, begins, live)
    for batch in range(2):
        real = live[batch].nonzero()[:, 0]
        one = (
            rows[batch : batch + 1, :, real],
            weights[batch : batch + 1, :, real],
            begins[batch : batch + 1, :, real],
        )
        alone = partial_means(*one)
        newest = live[batch].cumsum(0) - 1
        assert torch.equal(means[batch], alone[0][0][:, newest])
        assert torch.equal(masses[batch], alone[1][0][:, newest])


def test_a_segment_of_one_token_is_that_token_and_no_weight_changes_nothing() -> None:
    rows = torch.randn(1, 1, 4, 3)
    means, masses = partial_means(rows, torch.tensor([[[0.3, 0.7, 0.0, 0.0]]]), torch.tensor([[[1, 1, 0, 0]]]).bool())
    assert torch.equal(means[0, 0, :2], rows[0, 0, :2])
    assert torch.equal(means[0, 0, 2:], rows[0, 0, 1].expand(2, 3))
    assert masses[0, 0, 1:].eq(masses[0, 0, 1]).all()


@pytest.mark.parametrize("offset", [0.0, 5.0])
def test_zero_begins_and_one_accumulates(offset: float) -> None:
    """alpha is round(sigmoid): 0 at one half; omega is that of the group's mean logit."""
    keys, queries = torch.randn(2, 2, 7, 4), torch.randn(2, 6, 7, 4)
    keys[..., 1] = torch.linspace(-9, 9, 7) + offset
    made = rule(channel=1, offset=offset).decide(keys, queries)
    assert made.accumulates_BHT[0, 0].int().tolist() == [0, 0, 0, 0, 1, 1, 1]
    for batch in range(2):
        for head in range(2):
            for token in range(7):
                logits = queries[batch, 3 * head : 3 * head + 3, token, 1].tolist()
                alpha, omega = plain.decision(float(keys[batch, head, token, 1]), logits, offset)
                assert int(made.accumulates_BHT[batch, head, token]) == alpha
                assert float(made.weights_BHT[batch, head, token]) == pytest.approx(omega, abs=1e-6)


def test_a_weight_never_vanishes() -> None:
    made = rule().decide(torch.zeros(1, 1, 1, 2), torch.full((1, 1, 1, 2), -1e4))
    assert float(made.weights_BHT) > 0


def test_the_deciding_channel_is_zeroed_in_a_copy() -> None:
    rows = torch.randn(1, 2, 3, 4)
    zeroed = rule(channel=3).without_control(rows)
    assert zeroed[..., 3].eq(0).all()
    assert torch.equal(zeroed[..., :3], rows[..., :3])
    assert rows[..., 3].ne(0).all()
