"""A ragged view names ranges of flat slots; it never copies rows."""

from __future__ import annotations

import pytest
import torch

from hf_kvpolicy.errors import IntegrityError
from hf_kvpolicy.storage import RaggedView


def _view(starts: tuple[int, ...], lengths: tuple[int, ...], heads: int = 2, slots: int = 24) -> RaggedView:
    keys, values = torch.randn(slots, 4), torch.randn(slots, 3)
    return RaggedView(keys_ND=keys, values_ND=values, heads=heads, starts=starts, lengths=lengths)


def test_an_owner_is_a_slice_of_the_slots() -> None:
    view = _view((0, 7, 12, 20), (5, 0, 8, 4))
    assert view.batch == 2
    keys, values = view.owner(2)
    torch.testing.assert_close(keys, view.keys_ND[12:20])
    torch.testing.assert_close(values, view.values_ND[12:20])
    assert keys.data_ptr() == view.keys_ND[12:].data_ptr()
    assert view.owner(1)[0].shape == (0, 4)


@pytest.mark.parametrize(
    ("starts", "lengths", "heads"),
    [
        ((0, 6, 12, 18), (5, 5, 5, 5), 2),
        ((1, 4, 7), (3, 3, 3), 3),
        ((5,), (7,), 1),
        ((2, 2, 2), (0, 0, 0), 3),
        ((3, 9), (2, 2), 1),
    ],
)
def test_equal_and_evenly_spaced_owners_are_a_rectangle_without_a_copy(
    starts: tuple[int, ...], lengths: tuple[int, ...], heads: int
) -> None:
    view = _view(starts, lengths, heads)
    found = view.rectangle()
    assert found is not None
    for flat, rectangle in zip((view.keys_ND, view.values_ND), found, strict=True):
        assert rectangle.shape == (len(starts) // heads, heads, lengths[0], flat.shape[1])
        assert rectangle.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
        for owner, (start, rows) in enumerate(zip(starts, lengths, strict=True)):
            torch.testing.assert_close(rectangle[owner // heads, owner % heads], flat[start : start + rows])


def test_a_rectangle_of_a_slice_starts_where_the_slice_does() -> None:
    whole = torch.randn(40, 4)
    view = RaggedView(keys_ND=whole[8:], values_ND=whole[8:], heads=2, starts=(1, 11), lengths=(6, 6))
    found = view.rectangle()
    assert found is not None
    torch.testing.assert_close(found[0][0, 1], whole[19:25])


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [
        ((0, 6, 12, 18), (5, 5, 4, 5)),
        ((0, 6, 13, 18), (5, 5, 5, 5)),
        ((6, 0), (5, 5)),
        ((4, 4, 5, 5), (1, 1, 1, 1)),
    ],
)
def test_other_shapes_are_no_rectangle(starts: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    assert _view(starts, lengths).rectangle() is None


def test_numbers_for_kernels_count_the_tail_separately() -> None:
    view = RaggedView(
        keys_ND=torch.randn(9, 2), values_ND=torch.randn(9, 2), heads=2, starts=(0, 5), lengths=(4, 3), tail_rows=2
    )
    starts, base = view.on_device()
    assert (starts.dtype, starts.tolist()) == (torch.int32, [0, 5])
    assert (base.dtype, base.tolist()) == (torch.int32, [2, 1])


@pytest.mark.parametrize(
    ("starts", "lengths"),
    [((0, 20), (5, 5)), ((-1, 4), (2, 2)), ((0, 4), (2, -1)), ((0,), (2,)), ((0, 4), (2,)), ((), ())],
)
def test_ranges_outside_the_slots_are_refused(starts: tuple[int, ...], lengths: tuple[int, ...]) -> None:
    with pytest.raises(IntegrityError, match="ragged view"):
        _view(starts, lengths)
