"""Ragged rows that lie anywhere in their slots: packed, reordered and cut, they stay the rows their map names."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_kvpolicy.storage import RaggedLayer, RaggedMap, RaggedRows

# Two batch rows of two heads; tokens, slots and the spare slot of each owner.
OWNERS = [([0, 3, 7], [2, 0, 3], 1), ([5], [0], 1), ([], [], 0), ([1, 2], [1, 2], 0)]


def key_of(owner: int, token: int) -> float:
    return 100.0 * owner + token


def layer() -> RaggedLayer:
    rows = RaggedRows.allocate(torch.zeros(1, 3), torch.zeros(1, 2), [5, 2, 1, 4], 2)
    rows.keys_ND.fill_(float("nan"))
    rows.values_ND.fill_(float("nan"))
    for owner, (tokens, slots, _) in enumerate(OWNERS):
        keys, values = rows.owner(owner, rows.capacities[owner])
        for token, slot in zip(tokens, slots, strict=True):
            keys[slot], values[slot] = key_of(owner, token), -key_of(owner, token)

    def by_slot(shift: int) -> Tensor:
        """Return every owner's tokens in the order of their slots, -99 for the dead one."""
        found = []
        for tokens, slots, _ in OWNERS:
            at = dict(zip(slots, tokens, strict=True))
            found += [at.get(slot, -99 - shift) + shift for slot in range(len(tokens) + 1)]
        return torch.tensor(found, dtype=torch.int32)

    lengths = tuple(len(tokens) for tokens, _, _ in OWNERS)
    return RaggedLayer(
        rows=rows,
        map=RaggedMap(
            columns_P=by_slot(10),
            tokens_P=by_slot(0),
            lengths_O=torch.tensor(lengths, dtype=torch.int32),
            lengths=lengths,
            heads=2,
            states_PX=by_slot(0)[:, None].float(),
            spare_O=torch.tensor([spare for _, _, spare in OWNERS], dtype=torch.int32),
        ),
    )


def rows_of(stored: RaggedLayer) -> list[list[tuple[int, float, float, float]]]:
    """Return (token, key, value, state) of each owner's rows, read where the map says they lie."""
    table, found = stored.map, []
    slots, states = table.slots().split(list(table.lengths)), table.ordered().states_PX
    assert states is not None
    parts = states[:, 0].split(list(table.lengths))
    for owner, part in enumerate(table.owners()):
        keys, values = stored.rows.owner(owner, stored.rows.capacities[owner])
        tokens = part.tokens_BMW[0, 0].tolist()
        at = slots[owner]
        found.append(
            list(zip(tokens, keys[at, 0].tolist(), values[at, 0].tolist(), parts[owner].tolist(), strict=True))
        )
    return found


def expected(owners: list[int]) -> list[list[tuple[int, float, float, float]]]:
    return [[(t, key_of(o, t), -key_of(o, t), float(t)) for t in OWNERS[o][0]] for o in owners]


def test_packed_rows_lie_in_order_and_need_no_slots() -> None:
    stored = layer()
    assert rows_of(stored) == expected([0, 1, 2, 3])
    packed = stored.packed()
    assert not packed.map.is_open
    assert packed.map.spare_O is None
    assert rows_of(packed) == expected([0, 1, 2, 3])
    assert packed.packed() is packed, "there is nothing left to do"
    assert packed.rows.keys_ND.data_ptr() != stored.rows.keys_ND.data_ptr(), "what is published stays"
    assert packed.map.next_slots_O.tolist() == [3, 1, 0, 2]


def test_batch_rows_take_their_slots_along() -> None:
    chosen = layer().batch([1, 0, 0])
    assert rows_of(chosen) == expected([2, 3, 0, 1, 0, 1])
    assert chosen.map.next_slots_O.tolist() == [0, 0, 1, 1, 1, 1]
    assert rows_of(chosen.packed()) == expected([2, 3, 0, 1, 0, 1])


def test_rows_before_a_column() -> None:
    cut = layer().packed().map.before_column(13)
    assert cut.tokens_P.tolist() == [0, 1, 2]
    assert cut.lengths == (1, 0, 0, 2)
    assert cut.lengths_O.tolist() == [1, 0, 0, 2]
    assert cut.states_PX is not None
    assert cut.states_PX[:, 0].tolist() == [0, 1, 2]


def test_an_opened_map_tells_the_same_of_the_same_rows() -> None:
    packed = layer().packed()
    opened = RaggedLayer(rows=packed.rows, map=packed.map.opened())
    assert opened.map.slot_counts == (4, 2, 1, 3)
    assert opened.map.next_slots_O.tolist() == [3, 1, 0, 2]
    assert rows_of(opened) == expected([0, 1, 2, 3])
    assert opened.map.opened() is opened.map


def test_an_opened_map_without_any_row() -> None:
    opened = RaggedMap.empty(1, 2, torch.device("cpu")).opened()
    assert (opened.lengths, opened.slot_counts) == ((0, 0), (1, 1))
    assert opened.ordered().tokens_P.shape == (0,)
