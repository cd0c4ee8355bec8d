"""Merging two rows into a direction, which rows are not merged, and the store of a pair: against plain loops."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from reference import minicache as plain
from torch import Tensor

from hf_kvpolicy.representation import DepthPairs, layer_pairs
from hf_kvpolicy.representation.slerp import angular_distance, merge_rows, units
from hf_kvpolicy.storage.merged import MergedPair, MergedTensor


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rule(retention: float = 0.05, interpolation: float = 0.6) -> DepthPairs:
    return DepthPairs(
        name="merged_depth_pairs",
        replaces_rows=True,
        pairs=((0, 1),),
        interpolation=interpolation,
        retention=retention,
    )


SPECIAL: dict[str, tuple[list[float], list[float]]] = {
    "equal": ([3.0, -4.0, 1.0], [3.0, -4.0, 1.0]),
    "parallel": ([3.0, -4.0, 1.0], [6.0, -8.0, 2.0]),
    "nearly parallel": ([1.0, 0.0, 0.0], [1.0, 1e-7, 0.0]),
    "right angle": ([2.0, 0.0, 0.0], [0.0, 5.0, 0.0]),
    "lower is zero": ([0.0, 0.0, 0.0], [1.0, 2.0, -2.0]),
    "deeper is zero": ([1.0, 2.0, -2.0], [0.0, 0.0, 0.0]),
    "both are zero": ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0]),
    "tiny": ([1e-25, 2e-25, 0.0], [2e-25, 1e-25, 0.0]),
    "huge": ([1e25, 2e25, 0.0], [2e25, 1e25, 0.0]),
}


@pytest.mark.parametrize("interpolation", [0.0, 0.25, 0.6, 1.0])
@pytest.mark.parametrize("case", [*SPECIAL, *range(8)])
def test_a_merged_pair_is_restored_as_the_plain_loop_does(case: Any, interpolation: float) -> None:
    lower, deeper = (
        SPECIAL[case] if case in SPECIAL else (rows(6, seed=case).tolist(), rows(6, seed=50 + case).tolist())
    )
    merged = merge_rows(torch.tensor([[[lower]]]), torch.tensor([[[deeper]]]), interpolation)
    found = merged.shared_BHTD * merged.magnitudes_2BHT[..., None]
    for layer, (expected, original) in enumerate(
        zip(plain.restored(lower, deeper, interpolation), (lower, deeper), strict=True)
    ):
        scale = max(map(abs, original), default=0.0) or 1.0
        torch.testing.assert_close(found[layer, 0, 0, 0] / scale, torch.tensor(expected) / scale, atol=2e-6, rtol=0)
    assert float(merged.distances_BHT) == pytest.approx(plain.distance(lower, deeper), abs=1e-6)


def test_opposite_rows_merge_into_something_finite_and_are_exceptions() -> None:
    lower = rows(1, 2, 5, 4)
    merged = merge_rows(lower, -lower, 0.5)
    assert merged.shared_BHTD.isfinite().all()
    assert merged.magnitudes_2BHT.isfinite().all()
    apart = rule(0.0).exceptions(merged.distances_BHT, torch.full((1, 2), torch.inf), torch.ones(1, 5).bool())
    assert apart.all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equal_rows_come_back_bit_for_bit_in_two_bytes_and_to_an_ulp_in_four(dtype: torch.dtype) -> None:
    lower = rows(2, 3, 50, 16, dtype=dtype)
    merged = merge_rows(lower, lower, 0.6)
    assert not merged.distances_BHT.any()
    for magnitudes in merged.magnitudes_2BHT:
        found = (merged.shared_BHTD.float() * magnitudes[..., None]).to(dtype)
        if dtype is torch.float32:
            torch.testing.assert_close(found, lower, atol=0, rtol=5e-7)
        else:
            assert torch.equal(found, lower)


def test_lengths_are_kept_and_the_error_is_that_of_the_direction() -> None:
    """|x - x'| = 2 |x| sin(angle / 2), with the angle t Omega for the lower layer and (1 - t) Omega for the deeper."""
    both = torch.stack([rows(1, 2, 40, 16, seed=1), rows(1, 2, 40, 16, seed=2)])
    merged = merge_rows(both[0], both[1], 0.6)
    found = merged.shared_BHTD * merged.magnitudes_2BHT[..., None]
    torch.testing.assert_close(found.norm(dim=-1), both.norm(dim=-1), atol=0, rtol=1e-6)
    angle = merged.distances_BHT * torch.pi
    for layer, share in enumerate((0.6, 0.4)):
        error = 2 * both[layer].norm(dim=-1) * (share * angle / 2).sin()
        torch.testing.assert_close((found[layer] - both[layer]).norm(dim=-1), error, atol=1e-5, rtol=1e-5)


def test_small_angles_are_told_from_none() -> None:
    lower = torch.tensor([[[[1.0, 0.0]]]])
    for angle in (1e-6, 1e-4, 1e-2):
        deeper = torch.tensor([[[[math.cos(angle), math.sin(angle)]]]])
        assert float(angular_distance(*units(lower, deeper))) == pytest.approx(angle / math.pi, rel=1e-3)


@pytest.mark.parametrize("retention", [0.0, 0.05, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("lengths", [(40, 7), (20, 19), (1, 0), (3, 40)], ids=str)
def test_the_threshold_is_that_of_each_batch_rows_own_prompt(retention: float, lengths: tuple[int, int]) -> None:
    """Padded on the left; the numbers of pads never enter."""
    width = max(lengths)
    lower, deeper = rows(2, 2, width, 8, seed=3), rows(2, 2, width, 8, seed=4)
    live = torch.stack([torch.arange(width) >= width - n for n in lengths])
    distances = merge_rows(lower, deeper, 0.6).distances_BHT
    found = rule(retention).prompt_thresholds(distances, live)
    apart = rule(retention).exceptions(distances, found, live)
    assert not apart[~live[:, None].expand_as(apart)].any()
    for row, tokens in enumerate(lengths):
        for head in range(2):
            pair = [each[row, head, width - tokens :].tolist() for each in (lower, deeper)]
            if not tokens:
                assert found[row, head].isnan()
                continue
            limit = plain.threshold(*pair, retention)
            assert float(found[row, head]) == pytest.approx(limit, abs=1e-6)
            if retention and tokens * retention >= 1:
                assert int(apart[row, head].sum()) == math.ceil(retention * tokens - 1e-9), "the share of its rows"


def test_rows_without_distance_are_no_exceptions_unless_all_are() -> None:
    lower, live = rows(1, 1, 30, 8), torch.ones(1, 30).bool()
    distances = merge_rows(lower, lower, 0.6).distances_BHT
    for retention, expected in ((0.1, 0), (1.0, 30)):
        made = rule(retention)
        thresholds = made.prompt_thresholds(distances, live)
        assert int(made.exceptions(distances, thresholds, live).sum()) == expected


def test_what_cannot_be_compared_is_kept_as_it_was() -> None:
    distances = torch.tensor([[[0.1, torch.nan]]])
    apart = rule().exceptions(distances, torch.tensor([[0.5]]), torch.ones(1, 2).bool())
    assert apart.tolist() == [[[False, True]]]


@pytest.mark.parametrize("retention", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(
    ("lower", "deeper"),
    [
        # Of one direction a single number would be as long as all four of the other.
        ([65504.0] * 4, [1.0, 0.0, 0.0, 0.0]),
        ([1.0, math.nan, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
        ([1.0, 0.0, 0.0, 0.0], [-math.inf, 0.0, 0.0, 0.0]),
    ],
    ids=["overflow", "nan", "infinity"],
)
def test_what_is_not_finite_when_merged_is_kept_as_it_was_and_fixes_no_threshold(
    lower: list[float], deeper: list[float], retention: float
) -> None:
    pair, live = [rows(1, 1, 20, 4, seed=seed, dtype=torch.float16) for seed in (5, 6)], torch.ones(1, 20).bool()
    pair[0][0, 0, 3], pair[1][0, 0, 3] = torch.tensor(lower).half(), torch.tensor(deeper).half()
    distances, made = merge_rows(pair[0], pair[1], 1.0).distances_BHT, rule(retention)
    thresholds = made.prompt_thresholds(distances, live)
    assert bool(made.exceptions(distances, thresholds, live)[0, 0, 3])
    assert not thresholds.isnan().any()


@pytest.mark.parametrize(
    ("start", "geometry", "expected"),
    [
        (0, (None,) * 4, ((0, 1), (2, 3))),
        (0, (None,) * 5, ((0, 1), (2, 3))),
        (1, (None,) * 4, ((1, 2),)),
        (3, (None,) * 4, ()),
        (0, (7, None, None, 7, 7, None), ((1, 2), (3, 4))),
        (0, (7, None, 7, None), ()),
    ],
)
def test_pairs_are_neighbours_of_one_geometry(start: int, geometry: Any, expected: Any) -> None:
    assert layer_pairs(start, geometry) == expected


# -- the store --------------------------------------------------------------------------------------------------------


class Filled:
    """A store filled in pieces, and the plain list of what each row must be: [layer][batch][head][slot]."""

    def __init__(self, pieces: tuple[int, ...] = (9, 1, 1, 5, 30)) -> None:
        like = rows(3, 2, 1, 4)
        self.store = MergedTensor.allocate(like, 0)
        self.expected = torch.empty(2, 3, 2, 0, 4)
        for number, length in enumerate(pieces):
            self.add(length, number)

    def add(self, length: int, seed: int) -> None:
        used = self.expected.shape[3]
        shared, magnitudes = rows(3, 2, length, 4, seed=seed), rows(2, 3, 2, length, seed=seed + 100)
        both = rows(2, 3, 2, length, 4, seed=seed + 200)
        apart = torch.rand(3, 2, length, generator=torch.Generator().manual_seed(seed)) < 0.3
        self.store = self.store.grown(used, used + length)
        self.store.write(used, shared, magnitudes)
        self.store = self.store.note(used, apart, both)
        new = torch.where(apart[None, ..., None], both, shared * magnitudes[..., None])
        self.expected = torch.cat([self.expected, new], dim=3)

    def check(self) -> None:
        width = self.expected.shape[3]
        for layer in range(2):
            assert torch.equal(self.store.restored(layer, width), self.expected[layer])
            assert torch.equal(self.store.restored(layer, width, 3)[:, :, :width], self.expected[layer])
        used = self.store.index_E[: self.store.exceptions]
        assert (used[1:] > used[:-1]).all(), "the log ascends"


def test_what_was_put_is_restored() -> None:
    Filled().check()


def test_taking_back_leaves_what_was_before_and_the_log_goes_on() -> None:
    filled = Filled()
    for width in (30, 12, 9, 1):
        filled.store, filled.expected = filled.store.first(width), filled.expected[:, :, :, :width]
        filled.check()
        filled.add(2, width)
        filled.check()


def test_a_published_store_does_not_see_what_is_added_to_its_successor() -> None:
    filled = Filled()
    parent, expected = filled.store, filled.expected
    filled.add(7, 77)
    filled.check()
    for layer in range(2):
        assert torch.equal(parent.restored(layer, expected.shape[3]), expected[layer])


@pytest.mark.parametrize("index", [[2, 0, 1], [1, 1], [0, 0, 2, 2, 1, 1], [2]], ids=str)
def test_batch_rows_take_their_exceptions_along(index: list[int]) -> None:
    filled = Filled()
    filled.store, filled.expected = filled.store.batch(index), filled.expected[:, index]
    filled.check()


@pytest.mark.parametrize("map_heads", [1, 2])
def test_slots_are_used_again(map_heads: int) -> None:
    """Rows die, slot by slot and owner by owner; their exceptions go, and others take their slots."""
    filled = Filled((9, 5))
    parent, before = filled.store, filled.expected.clone()
    draw = torch.Generator().manual_seed(map_heads)
    for step in range(20):
        slot_BM = torch.randint(14, (3, map_heads), generator=draw)
        live = torch.ones(3, map_heads, 14, dtype=torch.bool).scatter(2, slot_BM[..., None], False)
        filled.store = filled.store.living(live)
        owner, slot = filled.store.entries()
        assert not (slot == slot_BM.expand(3, 2).flatten()[owner]).any()
        shared, magnitudes, both = rows(3, 2, 1, 4, seed=step), rows(2, 3, 2, 1, seed=step + 50), rows(2, 3, 2, 1, 4)
        apart = torch.rand(3, 2, 1, generator=draw) < 0.4
        # A slot that the first store still names is not written: this one has slots of its own.
        own = {name: getattr(filled.store, name).clone() for name in ("shared_BHCD", "magnitudes_2BHC")}
        filled.store = replace(filled.store, **own)
        filled.store.write_at(slot_BM, shared, magnitudes)
        filled.store = filled.store.note_at(slot_BM, apart, both)
        new = torch.where(apart[None, ..., None], both, shared * magnitudes[..., None])
        for row in range(3):
            for head in range(2):
                filled.expected[:, row, head, slot_BM[row, head % map_heads]] = new[:, row, head, 0]
        filled.check()
    for layer in range(2):
        assert torch.equal(parent.restored(layer, 14), before[layer])


@pytest.mark.parametrize("map_heads", [1, 2])
def test_what_is_taken_over_keeps_its_bits(map_heads: int) -> None:
    filled = Filled()
    index = torch.randint(46, (3, map_heads, 20), generator=torch.Generator().manual_seed(0))
    taken, apart = filled.store.taken(index, 25)
    at = index.expand(3, 2, 20)[..., None]
    assert taken.capacity == 25
    assert torch.equal(taken.shared_BHCD[:, :, :20], filled.store.shared_BHCD.gather(2, at.expand(-1, -1, -1, 4)))
    for layer in range(2):
        wanted = filled.expected[layer].gather(2, at.expand(-1, -1, -1, 4))
        assert torch.equal(taken.restored(layer, 20)[~apart], wanted[~apart])
        assert torch.equal(taken.note(0, apart, [wanted, wanted]).restored(layer, 20), wanted)


def test_rows_that_are_not_merged_lie_behind_the_others() -> None:
    keys = Filled((6, 3)).store
    pair = MergedPair(layers=(4, 5), keys=keys, values=keys, merged_slots=9)
    pieces = [[(rows(3, 2, n, 4, seed=n + k), rows(3, 2, n, 4, seed=n + k + 9)) for k in (20, 40)] for n in (2, 1, 4)]
    for number, piece in enumerate(pieces):
        pair = pair.holding(9 + sum(each[0][0].shape[2] for each in pieces[:number]), piece)
    for which, layer in enumerate(pair.layers):
        for part, found in enumerate(pair.restored(layer, 16, 2)):
            held = torch.cat([piece[which][part] for piece in pieces], dim=2)
            assert torch.equal(found[:, :, :9], keys.restored(which, 9))
            assert torch.equal(found[:, :, 9:16], held)
            assert torch.equal(pair.held(11, 5)[which][part], held[:, :, 2:])
    live = torch.ones(3, 1, 16, dtype=torch.bool)
    assert pair.payload_bytes(live) == 2 * keys.payload_bytes(6 * 9) + 6 * 7 * 2 * pair.row_bytes
    assert pair.first(12) is pair
    assert not pair.first(9).unmerged


def test_a_copy_is_independent() -> None:
    filled = Filled()
    twin = filled.store.copied()
    for tensor in filled.store.tensors():
        tensor.zero_()
    filled.store = twin
    filled.check()


@pytest.mark.parametrize(("dtype", "scalar"), [(torch.float32, 4), (torch.bfloat16, 2)], ids=str)
def test_payload_is_the_formula(dtype: torch.dtype, scalar: int) -> None:
    """2 T d b + 16 T + (2 d b + 4) (R_K + R_V) a KV head; what is allocated beyond it is slack."""
    tokens, dim = 40, 16
    made = MergedPair.allocate((2, 3), rows(1, 1, 1, dim, dtype=dtype), rows(1, 1, 1, dim, dtype=dtype), 0)
    apart = {"keys": 3, "values": 5}
    stores = {}
    for name, store in (("keys", made.keys), ("values", made.values)):
        mask = torch.arange(tokens).view(1, 1, -1) < apart[name]
        both = rows(2, 1, 1, tokens, dim, dtype=dtype)
        grown = store.grown(0, tokens)
        grown.write(0, both[0], torch.ones(2, 1, 1, tokens))
        stores[name] = grown.note(0, mask, both)
    pair = MergedPair(layers=(2, 3), **stores, merged_slots=tokens)
    live = torch.ones(1, 1, tokens, dtype=torch.bool)
    assert pair.payload_bytes(live) == plain.pair_bytes(tokens, 3, 5, dim, scalar)
    allocated = sum(tensor.numel() * tensor.element_size() for tensor in pair.tensors())
    assert allocated == pair.slot_bytes + 2 * 4
