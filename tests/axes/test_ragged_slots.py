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

    def flat(part: int) -> Tensor:
        return torch.tensor([number for owner in OWNERS for number in owner[part]], dtype=torch.int32)  # type: ignore[union-attr]

    lengths = tuple(len(tokens) for tokens, _, _ in OWNERS)
    return RaggedLayer(
        rows=rows,
        map=RaggedMap(
            columns_N=flat(0) + 10,
            tokens_N=flat(0),
            lengths_O=torch.tensor(lengths, dtype=torch.int32),
            lengths=lengths,
            heads=2,
            states_NX=flat(0)[:, None].float(),
            slots_N=flat(1),
            spare_O=torch.tensor([spare for _, _, spare in OWNERS], dtype=torch.int32),
        ),
    )


def rows_of(stored: RaggedLayer) -> list[list[tuple[int, float, float, float]]]:
    """Return (token, key, value, state) of each owner's rows, read where the map says they lie."""
    table, found = stored.map, []
    slots, states = table.slots().split(list(table.lengths)), table.states_NX
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
    assert packed.map.slots_N is None
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
    assert cut.tokens_N.tolist() == [0, 1, 2]
    assert cut.lengths == (1, 0, 0, 2)
    assert cut.lengths_O.tolist() == [1, 0, 0, 2]
    assert cut.states_NX is not None
    assert cut.states_NX[:, 0].tolist() == [0, 1, 2]
