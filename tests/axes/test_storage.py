"""Slots, their maps, and gathers: symbolic values make a wrong row visible."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_kvpolicy.storage import DenseRows, RowMap, gather_rows, growth_slots, pack_rows


def row_map(tokens: list[list[list[int]]], dead: int = -1, *, shift: int = 0) -> RowMap:
    """A map whose columns are tokens + shift; `dead` marks dead slots."""
    numbers = torch.tensor(tokens, dtype=torch.int32)
    return RowMap(columns_BMW=numbers + shift, tokens_BMW=numbers, live_BMW=numbers != dead, ordered=True)


def live_tokens(table: RowMap) -> list[list[list[int]]]:
    return [
        [t[live].tolist() for t, live in zip(row, flags, strict=True)]
        for row, flags in zip(table.tokens_BMW, table.live_BMW, strict=True)
    ]


def symbolic(layer: int, heads: int, rows: int, dim: int, *, values: bool = False, batch: int = 1) -> Tensor:
    """K[l,h,p,c] = 1000 l + 100 h + 10 p + c, V = 5000 + the same (0x07G); batch rows add 20000 each."""
    grid = torch.arange(heads)[:, None, None] * 100 + torch.arange(rows)[:, None] * 10 + torch.arange(dim)
    grid = grid + 1000 * layer + (5000 if values else 0)
    return torch.stack([grid + 20000 * b for b in range(batch)]).float()


# -- RowMap -------------------------------------------------------------------------------------------------------


def test_then_joins_slots_and_broadcasts_a_shared_map() -> None:
    shared, own = row_map([[[0, 1]]], shift=2), row_map([[[5, 6, 7], [5, -1, 7]]])
    joined = shared.then(own)
    assert live_tokens(joined) == [[[0, 1, 5, 6, 7], [0, 1, 5, 7]]]
    assert joined.columns_BMW[0, 1].tolist() == [2, 3, 5, -1, 7]
    assert live_tokens(own.then(shared)) == [[[5, 6, 7, 0, 1], [5, 7, 0, 1]]]
    assert (joined.width, joined.map_heads, joined.ordered) == (5, 2, True)


def test_then_is_neutral_on_an_empty_map_and_remembers_disorder() -> None:
    empty, some = RowMap.empty(2, torch.device("cpu")), row_map([[[0, 1]], [[3, 4]]])
    assert empty.width == 0
    assert empty.then(some) is some
    assert some.then(empty) is some
    wrapped = RowMap(columns_BMW=some.columns_BMW, tokens_BMW=some.tokens_BMW, live_BMW=some.live_BMW, ordered=False)
    assert not some.then(wrapped).ordered
    assert not wrapped.then(some).ordered
    assert not wrapped.first(1).ordered


def test_first_is_a_copy_that_keeps_no_parent_alive() -> None:
    table = row_map([[list(range(100))]])
    part = table.first(3)
    assert live_tokens(part) == [[[0, 1, 2]]]
    assert part.tokens_BMW.untyped_storage().nbytes() == 3 * 4
    assert part.live_BMW.untyped_storage().nbytes() == 3


def test_gathered_follows_rows_and_a_dead_slot_stays_dead() -> None:
    table = row_map([[[4, -1, 6, 7]]], shift=10)
    index = torch.tensor([[[3, 0, 1], [2, 2, 0]]])
    live = torch.tensor([[[True, True, True], [True, False, True]]])
    got = table.gathered(index, live, ordered=False)
    assert got.tokens_BMW.tolist() == [[[7, 4, -1], [6, 6, 4]]]
    assert got.columns_BMW.tolist() == [[[17, 14, 9], [16, 16, 14]]]
    assert got.live_BMW.tolist() == [[[True, True, False], [True, False, True]]]
    assert not got.ordered


@pytest.mark.parametrize("index", [[1, 0], [0, 0, 1, 1], [1], [2, 2, 2]])
def test_batch_moves_whole_rows(index: list[int]) -> None:
    table = row_map([[[0, 1]], [[2, -1]], [[-1, 5]]])
    got = table.batch(torch.tensor(index))
    assert live_tokens(got) == [live_tokens(table)[i] for i in index]
    assert got.tokens_BMW.untyped_storage().data_ptr() != table.tokens_BMW.untyped_storage().data_ptr()


@pytest.mark.parametrize("column", range(8))
def test_before_column_kills_only_later_rows(column: int) -> None:
    table = row_map([[[0, 1, -1, 3]]], shift=2)  # columns 2, 3, (dead), 5
    got = table.before_column(column)
    assert live_tokens(got) == [[[t for t in (0, 1, 3) if t + 2 < column]]]
    assert live_tokens(table) == [[[0, 1, 3]]], "a map is never written"


def test_to_keeps_everything() -> None:
    table = row_map([[[0, -1, 2]]])
    assert live_tokens(table.to(torch.device("cpu"))) == live_tokens(table)


# -- DenseRows ----------------------------------------------------------------------------------------------------


def dense(used: int, capacity: int, *, batch: int = 1, pinned: int = 0) -> DenseRows:
    keys, values = (symbolic(0, 2, used, 3, values=v, batch=batch) for v in (False, True))
    rows = DenseRows.allocate(keys, values, capacity, pinned)
    rows.write(0, keys, values)
    return rows


@pytest.mark.parametrize("needed", [1, 2, 15, 16, 255, 256, 4096, 10**6])
def test_growth_is_amortised_with_bounded_slack(needed: int) -> None:
    assert needed + 16 <= growth_slots(needed) <= needed + 256


def test_grown_copies_used_slots_and_leaves_the_parent() -> None:
    rows = dense(4, 5, pinned=2)
    assert rows.grown(4, 5) is rows
    larger = rows.grown(4, 6)
    assert larger.capacity == growth_slots(6)
    assert torch.equal(larger.keys_BSCD[:, :, :4], symbolic(0, 2, 4, 3))
    assert torch.equal(larger.values_BSCD[:, :, :4], symbolic(0, 2, 4, 3, values=True))
    assert larger.pinned_keys_BSPD is rows.pinned_keys_BSPD
    larger.write(0, larger.keys_BSCD[:, :, 1:2].clone(), larger.values_BSCD[:, :, 1:2].clone())
    assert torch.equal(rows.keys_BSCD[:, :, :4], symbolic(0, 2, 4, 3))


@pytest.mark.parametrize(("needed", "limit", "capacity"), [(6, 7, 7), (6, 6, 6), (6, 3, 6), (6, 1000, 22)])
def test_grown_wastes_nothing_beyond_its_limit(needed: int, limit: int, capacity: int) -> None:
    assert dense(4, 5).grown(4, needed, limit=limit).capacity == capacity


def test_write_touches_only_its_slots() -> None:
    rows = dense(4, 8)
    before_keys, before_values = rows.keys_BSCD.clone(), rows.values_BSCD.clone()
    rows.write(5, torch.full((1, 2, 2, 3), 7.0), torch.full((1, 2, 2, 3), 8.0))
    assert (rows.keys_BSCD[:, :, 5:7] == 7).all()
    assert (rows.values_BSCD[:, :, 5:7] == 8).all()
    kept = [0, 1, 2, 3, 4, 7]
    assert torch.equal(rows.keys_BSCD[:, :, kept].nan_to_num(), before_keys[:, :, kept].nan_to_num())
    assert torch.equal(rows.values_BSCD[:, :, kept].nan_to_num(), before_values[:, :, kept].nan_to_num())


def test_write_at_gives_each_batch_row_a_slot_of_its_own() -> None:
    rows = dense(4, 4, batch=3)
    expected = rows.keys_BSCD.clone()
    new = torch.arange(18.0).view(3, 2, 1, 3)
    rows.write_at(torch.tensor([2, 0, 2]), new, new + 100)
    for row, slot in enumerate([2, 0, 2]):
        expected[row, :, slot] = new[row, :, 0]
        assert torch.equal(rows.values_BSCD[row, :, slot], new[row, :, 0] + 100)
    assert torch.equal(rows.keys_BSCD, expected)


@pytest.mark.parametrize("pinned", [0, 2])
def test_batch_and_copied_are_independent(pinned: int) -> None:
    rows = dense(4, 4, batch=2, pinned=pinned)
    for other, source in ((rows.batch(torch.tensor([1, 1, 0])), [1, 1, 0]), (rows.copied(), [0, 1])):
        assert torch.equal(other.keys_BSCD, rows.keys_BSCD[source])
        assert torch.equal(other.values_BSCD, rows.values_BSCD[source])
        assert (other.pinned_keys_BSPD is None) == (not pinned)
        theirs = {t.untyped_storage().data_ptr() for t in other.tensors()}
        assert not theirs & {t.untyped_storage().data_ptr() for t in rows.tensors()}


def test_bytes_of_a_row_follow_key_and_value_dimensions_and_dtype() -> None:
    keys, values = torch.zeros(1, 2, 1, 3, dtype=torch.bfloat16), torch.zeros(1, 2, 1, 5, dtype=torch.bfloat16)
    rows = DenseRows.allocate(keys, values, 4)
    assert rows.row_bytes == (3 + 5) * 2
    assert sum(t.untyped_storage().nbytes() for t in rows.tensors()) == 2 * 4 * rows.row_bytes


# -- gathers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize(
    "positions", [[[1, 2, 4, 5], [0, 1, 4, 5]], [[2, 3, 4, 5], [1, 2, 4, 5]], [[0], [5]], [[], []]]
)
def test_gathers_symbolic_rows_per_owner(layer: int, positions: list[list[int]]) -> None:
    index = torch.tensor([positions], dtype=torch.int64).view(1, 2, -1)
    for values in (False, True):
        got = gather_rows(symbolic(layer, 2, 6, 3, values=values), index, 2)
        base = 1000 * layer + (5000 if values else 0)
        expected = [[[base + 100 * h + 10 * p + c for c in range(3)] for p in positions[h]] for h in range(2)]
        assert got[0].tolist() == expected


def test_one_shared_index_serves_all_heads_and_batch_rows_differ() -> None:
    rows = symbolic(0, 2, 6, 3, batch=2)
    got = gather_rows(rows, torch.tensor([[[1, 4]], [[0, 5]]]), 2)
    assert torch.equal(got[0], rows[0][:, [1, 4]])
    assert torch.equal(got[1], rows[1][:, [0, 5]])


@pytest.mark.parametrize("group", [1, 2, 3])
def test_query_heads_read_their_own_kv_head(group: int) -> None:
    rows = symbolic(1, 2, 6, 3, batch=2)
    stored = 2 * group
    index = torch.stack([torch.randperm(6)[:4] for _ in range(2 * stored)]).view(2, stored, 4)
    got = gather_rows(rows, index, stored)
    for row in range(2):
        for head in range(stored):
            assert torch.equal(got[row, head], rows[row, head // group][index[row, head]])


@pytest.mark.parametrize(("stored", "pinned"), [(2, 0), (2, 1), (2, 6), (4, 0), (4, 3)])
def test_packing_copies_the_selection(stored: int, pinned: int) -> None:
    keys, values = symbolic(0, 2, 6, 3), symbolic(0, 2, 6, 5, values=True)
    index = torch.tensor([[[1, 2, 4, 5]]])
    packed = pack_rows(keys, values, index, stored_heads=stored, capacity=9, pinned=pinned)
    expected = keys.repeat_interleave(stored // 2, dim=1)[:, :, [1, 2, 4, 5]]
    assert packed.capacity == 9
    keys.fill_(float("nan"))  # a view of the source would see this
    assert torch.equal(packed.keys_BSCD[:, :, :4], expected)
    assert torch.equal(packed.values_BSCD[:, :, :4], values.repeat_interleave(stored // 2, dim=1)[:, :, [1, 2, 4, 5]])
    assert packed.keys_BSCD.untyped_storage().nbytes() == stored * 9 * 3 * 4
    if pinned:
        assert packed.pinned_keys_BSPD is not None
        count = min(pinned, 4)
        assert torch.equal(packed.pinned_keys_BSPD[:, :, :count], expected[:, :, :count])
        assert not packed.pinned_keys_BSPD[:, :, count:].any()
    else:
        assert packed.pinned_keys_BSPD is None
