"""Flat slots, their maps, and what moves them: symbolic values make a wrong row visible."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hf_kvpolicy.storage import RaggedLayer, RaggedMap, RaggedRows, growth_slots

DIM = 3


def ragged_map(tokens: list[list[int]], heads: int, shift: int = 0) -> RaggedMap:
    owners = [torch.tensor(own, dtype=torch.int32) for own in tokens]
    return RaggedMap.of([(own + shift, own) for own in owners], heads)


def symbolic(owner: int, tokens: list[int], width: int = DIM) -> Tensor:
    """Row (owner, token) is 100 owner + token + channel / 10."""
    return torch.tensor([[100.0 * owner + t + c / 10 for c in range(width)] for t in tokens]).reshape(-1, width)


def filled(tokens: list[list[int]], heads: int, slack: int = 2) -> RaggedLayer:
    like_keys, like_values = torch.zeros(1, DIM), torch.zeros(1, DIM + 1)
    rows = RaggedRows.allocate(like_keys, like_values, [len(own) + slack for own in tokens], heads)
    rows.keys_ND.fill_(float("nan"))
    rows.values_ND.fill_(float("nan"))
    for owner, own in enumerate(tokens):
        keys, values = rows.owner(owner, len(own))
        keys.copy_(symbolic(owner, own))
        values.copy_(-symbolic(owner, own, DIM + 1))
    return RaggedLayer(rows=rows, map=ragged_map(tokens, heads, shift=7))


def held(layer: RaggedLayer) -> list[tuple[list[int], list[int], Tensor, Tensor]]:
    return [
        (part.columns_BMW[0, 0].tolist(), part.tokens_BMW[0, 0].tolist(), *layer.rows.owner(owner, part.width))
        for owner, part in enumerate(layer.map.owners())
    ]


def test_owners_lie_back_to_back_with_their_own_slack() -> None:
    layer = filled([[0, 2, 5], [1], [], [3, 4]], heads=2)
    assert layer.map.lengths == (3, 1, 0, 2)
    assert layer.map.offsets == (0, 3, 4, 4, 6)
    assert layer.map.batch_size == 2
    assert layer.rows.starts == (0, 5, 8, 10)
    assert layer.rows.starts_O.tolist() == [0, 5, 8, 10]
    assert layer.rows.slots == 14
    assert layer.rows.row_bytes == 4 * (DIM + DIM + 1)
    assert [tokens for _, tokens, _, _ in held(layer)] == [[0, 2, 5], [1], [], [3, 4]]
    assert [columns for columns, _, _, _ in held(layer)] == [[7, 9, 12], [8], [], [10, 11]]


def test_appending_writes_behind_each_owner_and_nowhere_else() -> None:
    layer = filled([[0, 2, 5], [1], [], [3, 4]], heads=2)
    before = layer.rows.keys_ND.clone()
    new = torch.arange(2 * 2 * 2 * DIM, dtype=torch.float32).view(2, 2, 2, DIM) + 1000
    values = torch.cat([new, new[..., :1]], dim=3)
    layer.rows.write(layer.map.lengths_O, 0, new, values)
    for owner, length in enumerate(layer.map.lengths):
        keys, _ = layer.rows.owner(owner, length + 2)
        assert torch.equal(keys[length:], new[owner // 2, owner % 2])
        assert torch.equal(keys[:length], before[layer.rows.starts[owner] :][:length])
    one = torch.full((2, 2, 1, DIM), -5.0)
    layer.rows.write(layer.map.lengths_O, 1, one, torch.cat([one, one[..., :1]], dim=3))
    for owner, length in enumerate(layer.map.lengths):
        keys, row_values = layer.rows.owner(owner, length + 2)
        assert (keys[-1] == -5).all()
        assert (row_values[-1] == -5).all()
        assert torch.equal(keys[-2], new[owner // 2, owner % 2, 0])


def test_growing_copies_what_is_used_and_only_when_there_is_no_room() -> None:
    layer = filled([[0, 2, 5], [1]], heads=1, slack=1)
    used = list(layer.map.lengths)
    assert layer.rows.grown(used, [4, 2]) is layer.rows
    larger = layer.rows.grown(used, [5, 3])
    assert larger is not layer.rows
    assert larger.capacities == (growth_slots(5), growth_slots(3))
    assert torch.equal(larger.owner(0, 3)[0], symbolic(0, [0, 2, 5]))
    assert torch.equal(larger.owner(1, 1)[1], -symbolic(1, [1], DIM + 1))


@pytest.mark.parametrize("index", [[1], [1, 0], [0, 0, 1], [], [1, 1, 1]])
def test_batch_rows_move_with_all_their_owners(index: list[int]) -> None:
    layer = filled([[0, 2, 5], [1], [], [3, 4]], heads=2)
    chosen = layer.batch(index)
    want = [held(layer)[row * 2 + head] for row in index for head in range(2)]
    for (columns, tokens, keys, values), expected in zip(held(chosen), want, strict=True):
        assert (columns, tokens) == expected[:2]
        assert torch.equal(keys, expected[2])
        assert torch.equal(values, expected[3])
    pointers = {t.data_ptr() for t in chosen.rows.tensors() if t.numel()}
    assert not pointers & {t.data_ptr() for t in layer.rows.tensors()}, "always a copy"


def test_cropping_cuts_each_owner_at_its_own_place() -> None:
    cropped = ragged_map([[0, 2, 5], [1], [], [3, 4, 9]], heads=2, shift=7).before_column(7 + 4)
    assert cropped.lengths == (2, 1, 0, 1)
    assert [part.tokens_BMW[0, 0].tolist() for part in cropped.owners()] == [[0, 2], [1], [], [3]]
    assert cropped.lengths_O.tolist() == [2, 1, 0, 1]


def test_the_view_names_exactly_the_rows_of_map_and_tail() -> None:
    layer = filled([[0, 2, 5], [1]], heads=1)
    view = layer.rows.view(layer.map, 2)
    assert view.lengths == (5, 3)
    assert view.starts == layer.rows.starts
    assert (view.tail_rows, view.batch, view.heads) == (2, 2, 1)
    assert view.keys_ND is layer.rows.keys_ND, "attention reads where rows lie"


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_any_sequence_of_appends_and_reorders(data: st.DataObject) -> None:
    """The layer is always what a plain list of rows says, whatever its slack."""
    heads = data.draw(st.integers(1, 3))
    plain = [data.draw(st.lists(st.integers(0, 50), unique=True, max_size=6).map(sorted)) for _ in range(2 * heads)]
    layer = filled(plain, heads, slack=data.draw(st.integers(0, 3)))
    rows = [symbolic(owner, own) for owner, own in enumerate(plain)]
    behind = 0
    for step in range(data.draw(st.integers(1, 5))):
        if data.draw(st.booleans()):
            new = torch.full((layer.map.batch_size, heads, data.draw(st.integers(1, 4)), DIM), -1.0 - step)
            used = [n + behind for n in layer.map.lengths]
            grown = layer.rows.grown(used, [n + new.shape[2] for n in used])
            grown.write(layer.map.lengths_O, behind, new, torch.cat([new, new[..., :1]], dim=3))
            layer = RaggedLayer(rows=grown, map=layer.map)
            behind += new.shape[2]
            rows = [torch.cat([own, new[o // heads, o % heads]]) for o, own in enumerate(rows)]
        else:
            last = layer.map.batch_size - 1
            index = data.draw(st.lists(st.integers(0, last), min_size=1, max_size=3))
            layer = layer.batch(index)
            rows = [rows[row * heads + head] for row in index for head in range(heads)]
        for owner, expected in enumerate(rows):
            found, _ = layer.rows.owner(owner, layer.map.lengths[owner] + behind)
            assert torch.equal(found, expected)
