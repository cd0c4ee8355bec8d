"""Numbers in few bits and the store of coded rows: bounds, and a plain loop over what every slot holds."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import Tensor

from hf_kvpolicy.storage import DenseRows, RaggedMap, RaggedRows
from hf_kvpolicy.storage.coded import CodedRows, code_due, due_blocks
from hf_kvpolicy.storage.codes import CHANNEL_AXIS, ROW_AXIS, CodedTensor, code_bytes
from hf_kvpolicy.storage.ragged_coded import CodedRaggedRows, code_owners

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rows(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    spread = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    # Channels of unlike size and offset, as keys have.
    return (spread * torch.logspace(-2, 1, shape[-1]) + torch.linspace(-9, 9, shape[-1])).to(dtype)


def groups(found: CodedTensor, numbers: Tensor, live: Tensor) -> Any:
    """Yield (numbers, codes read as integers, what is read back, scale, zero) of every group, as plain lists."""
    read = found.decoded().double()
    for b, s, n in itertools.product(*(range(size) for size in numbers.shape[:3])):
        block, back = numbers[b, s, n].double(), read[b, s, n]
        alive = live[b, s, n]
        if found.axis == ROW_AXIS:
            for d in range(block.shape[1]):
                yield block[alive, d], back[alive, d], found.scales[b, s, n, 0, d], found.zeros[b, s, n, 0, d]
        else:
            for g in alive.nonzero()[:, 0].tolist():
                yield block[g], back[g], found.scales[b, s, n, g, 0], found.zeros[b, s, n, g, 0]


def check_bound(numbers: Tensor, live: Tensor, bits: int, axis: int) -> None:
    """What is read is off by half a step and the rounding of the result, and a step is no wider than the range asks."""
    limits, levels = torch.finfo(numbers.dtype), 2**bits - 1
    found = CodedTensor.encode(numbers, live, bits=bits, axis=axis)
    assert found.decoded().isfinite().all()
    for group, read, scale, zero in groups(found, numbers, live):
        step, size = float(scale), float(group.abs().max()) if group.numel() else 0.0
        rounding = limits.eps * size + limits.smallest_normal
        assert float((group - read).abs().max() if group.numel() else 0.0) <= step / 2 + rounding
        width = float(group.max() - group.min()) if group.numel() else 0.0
        # The stored zero is rounded, which the scale makes good.
        assert step <= (width / levels) * (1 + 2 * limits.eps) + 2 * rounding
        if not width:
            assert float((read - float(zero)).abs().max() if group.numel() else 0.0) <= rounding


@pytest.mark.parametrize("axis", [ROW_AXIS, CHANNEL_AXIS])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_the_error_is_half_a_step(dtype: torch.dtype, bits: int, axis: int, data: st.DataObject) -> None:
    shape = (1, 1, data.draw(st.integers(1, 2)), data.draw(st.integers(1, 5)), data.draw(st.integers(1, 7)))
    limit = torch.finfo(dtype).max / 4
    normal = st.floats(-limit, limit, allow_nan=False, allow_subnormal=False, width=64)
    few = st.sampled_from([0.0, 1.0, -1.0, 3.14159, 1e-6, limit, -limit])
    numbers = torch.from_numpy(data.draw(hnp.arrays("float64", shape, elements=st.one_of(normal, few)))).to(dtype)
    live = torch.from_numpy(data.draw(hnp.arrays("bool", shape[:4])))
    check_bound(numbers, live, bits, axis)


@pytest.mark.parametrize("axis", [ROW_AXIS, CHANNEL_AXIS])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 2, 32, 64), (1, 2, 1, 1, 5), (1, 1, 3, 4, 1)], ids=str)
def test_rows_like_a_models(shape: tuple[int, ...], dtype: torch.dtype, bits: int, axis: int) -> None:
    live = torch.rand(shape[:4], generator=torch.Generator().manual_seed(1)) < 0.8
    check_bound(rows(*shape, dtype=dtype), live, bits, axis)


@pytest.mark.parametrize("axis", [ROW_AXIS, CHANNEL_AXIS])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_constant_group_is_exact(bits: int, axis: int) -> None:
    numbers = torch.full((1, 1, 1, 4, 6), 0.1)
    found = CodedTensor.encode(numbers, torch.ones(1, 1, 1, 4, dtype=torch.bool), bits=bits, axis=axis)
    assert torch.equal(found.decoded(), numbers)


@pytest.mark.parametrize("axis", [ROW_AXIS, CHANNEL_AXIS])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), 1e30])
def test_dead_rows_change_nothing(poison: float, bits: int, axis: int) -> None:
    numbers, live = rows(1, 2, 2, 4, 6), torch.ones(1, 2, 2, 4, dtype=torch.bool)
    live[:, :, 0, 1:3] = live[:, 1, 1] = False
    clean = CodedTensor.encode(numbers.masked_fill(~live[..., None], 0.0), live, bits=bits, axis=axis)
    dirty = CodedTensor.encode(numbers.masked_fill(~live[..., None], poison), live, bits=bits, axis=axis)
    for a, b in zip(clean.tensors(), dirty.tensors(), strict=True):
        assert torch.equal(a, b)


NOT_FINITE = (float("nan"), float("inf"), -float("inf"))


def plain_voids(numbers: list[float], bits: int) -> tuple[float, list[bool]]:
    """Return the widest step that a group's finite numbers ask for, and which are read as NaN: one code is theirs."""
    finite = [number for number in numbers if math.isfinite(number)]
    width = max(finite) - min(finite) if finite else 0.0
    levels = 2**bits - (1 if len(finite) == len(numbers) else 2)
    return width / levels, [not math.isfinite(number) for number in numbers]


@pytest.mark.parametrize("axis", [ROW_AXIS, CHANNEL_AXIS])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", NOT_FINITE)
def test_a_number_that_is_not_finite_spoils_no_other(poison: float, dtype: torch.dtype, bits: int, axis: int) -> None:
    numbers, live = rows(1, 2, 3, 8, 6, dtype=dtype), torch.ones(1, 2, 3, 8, dtype=torch.bool)
    numbers[0, 0, 1, 2] = poison  # a row
    numbers[0, 1, 0, 5, 3] = poison  # one of its channels
    numbers[0, 1, 0, :, 4] = 2.5  # a channel of equal numbers, one of them not finite
    numbers[0, 1, 0, 0, 4] = poison
    numbers[0, 1, 2, :] = poison  # a block
    live[0, 1, 0, 7] = False
    found = CodedTensor.encode(numbers, live, bits=bits, axis=axis)
    limits = torch.finfo(dtype)
    for group, read, scale, _ in groups(found, numbers, live):
        step, is_void = plain_voids(group.tolist(), bits)
        assert read.isnan().tolist() == is_void
        finite = ~torch.tensor(is_void)
        size = float(group[finite].abs().max()) if finite.any() else 0.0
        rounding = limits.eps * size + limits.smallest_normal
        assert abs(float(scale)) <= step * (1 + 2 * limits.eps) + 2 * rounding
        error = (group - read)[finite].abs()
        assert not finite.any() or float(error.max()) <= abs(float(scale)) / 2 + rounding


@pytest.mark.parametrize("bits", [8, 4])
def test_voids_stay_where_blocks_are_put_together(bits: int) -> None:
    clean, live = rows(1, 1, 2, 4, 5), torch.ones(1, 1, 2, 4, dtype=torch.bool)
    dirty = clean.clone()
    dirty[0, 0, 0, 1, 2] = torch.inf
    whole, holed = (CodedTensor.encode(part, live, bits=bits, axis=ROW_AXIS) for part in (clean, dirty))
    assert not whole.has_voids
    assert whole.then(whole).has_voids is False
    turned = torch.tensor([[[1, 0]]])
    for joined, block in (
        (whole.then(holed), 2),
        (holed.then(whole), 0),
        (holed.chosen(turned), 1),
    ):
        expected = torch.zeros(joined.codes_BSNGX.shape[2:4], dtype=torch.bool)
        expected[block, 1] = True
        assert torch.equal(joined.decoded().isnan().any(-1)[0, 0], expected)
    # What is read and coded again is void again.
    again = CodedTensor.encode(holed.decoded(), live, bits=bits, axis=CHANNEL_AXIS)
    assert torch.equal(again.decoded().isnan(), holed.decoded().isnan())


@pytest.mark.parametrize("dim", [1, 2, 5, 6])
def test_two_codes_share_a_byte(dim: int) -> None:
    numbers, live = rows(1, 1, 1, 3, dim), torch.ones(1, 1, 1, 3, dtype=torch.bool)
    found = CodedTensor.encode(numbers, live, bits=4, axis=CHANNEL_AXIS)
    assert found.codes_BSNGX.shape[-1] == code_bytes(dim, 4) == -(-dim // 2)
    read, half = found.decoded()[0, 0, 0], -(-dim // 2)
    for g, d in itertools.product(range(3), range(dim)):
        byte = int(found.codes_BSNGX[0, 0, 0, g, d % half]) & 255
        nibble = byte >> 4 if d >= half else byte & 15
        code = nibble - 16 if nibble > 7 else nibble
        expected = found.zeros[0, 0, 0, g, 0] + found.scales[0, 0, 0, g, 0] * code
        assert float(read[g, d]) == pytest.approx(float(expected), rel=1e-6)


# -- the store --------------------------------------------------------------------------------------------------------

BLOCK, PINNED = 3, 2


def store(width: int, bits: int = 8, *, pinned: int = PINNED) -> tuple[DenseRows, DenseRows, Tensor]:
    """Return a dense store, the same rows with what is due coded, and which slots are live."""
    keys, values = rows(2, 2, width, 5, seed=1), rows(2, 2, width, 4, seed=2)
    plain = DenseRows.allocate(keys, values, width + 3, pinned)
    plain.write(0, keys, values)
    live = torch.ones(2, 1, width, dtype=torch.bool)
    live[1, :, pinned : pinned + 2] = False
    return plain, code_due(plain, width, live, bits=bits, block_rows=BLOCK, pinned=pinned), live


def test_the_newest_rows_stay_as_they_are() -> None:
    for held in range(30):
        left = held - due_blocks(held, BLOCK) * BLOCK
        assert left == held if held < 2 * BLOCK else BLOCK <= left < 2 * BLOCK


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("pinned", [0, PINNED])
def test_every_slot_keeps_its_place(bits: int, pinned: int) -> None:
    plain, coded, live = store(17, bits, pinned=pinned)
    assert isinstance(coded, CodedRows)
    start = coded.pinned + coded.coded_slots
    for part, (whole, shown) in enumerate(zip(plain.view(17), coded.view(17), strict=True)):
        for b, s, slot in itertools.product(range(2), range(2), range(17)):
            if slot < pinned or slot >= start:
                assert torch.equal(shown[b, s, slot], whole[b, s, slot])
            elif live[b, 0, slot]:
                block, row = divmod(slot - pinned, BLOCK)
                blocks = (coded.key_blocks, coded.value_blocks)[part]
                scale = blocks.scales[b, s, block, 0] if not part else blocks.scales[b, s, block, row]
                error = (shown[b, s, slot] - whole[b, s, slot]).abs()
                assert (error <= scale / 2 + 1e-5).all()


def check_one_bad_row(whole: Tensor, read: Tensor, coded_rows: int, bad: int, bits: int) -> None:
    """Of one owner: the bad row is not finite, the others are off by half a step of what is finite in a block."""
    assert not read[bad].isfinite().all()
    for first in range(0, coded_rows, BLOCK):
        others = [row for row in range(first, first + BLOCK) if row != bad]
        step = (whole[others].amax(0) - whole[others].amin(0)) / (2**bits - 2)
        step = torch.maximum(step, (whole[others].amax(1) - whole[others].amin(1)).max() / (2**bits - 2))
        assert ((read[others] - whole[others]).abs() <= step / 2 * 1.001 + 1e-5).all()
    assert torch.equal(read[coded_rows:], whole[coded_rows:])


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("poison", NOT_FINITE)
def test_one_bad_row_spoils_no_slot_of_its_block(poison: float, bits: int) -> None:
    keys, values = rows(1, 2, 11, 5, seed=1), rows(1, 2, 11, 4, seed=2)
    keys[0, 1, 4] = values[0, 1, 4] = poison
    plain = DenseRows.allocate(keys, values, 11)
    plain.write(0, keys, values)
    coded = code_due(plain, 11, torch.ones(1, 1, 11, dtype=torch.bool), bits=bits, block_rows=BLOCK, pinned=0)
    assert isinstance(coded, CodedRows)
    for whole, read in zip(plain.view(11), coded.view(11), strict=True):
        check_one_bad_row(whole[0, 1], read[0, 1], coded.coded_slots, 4, bits)
        assert read[0, 0].isfinite().all()
    assert not coded.batch(torch.tensor([0])).view(11)[0][0, 1, 4].isfinite().any()


def test_a_second_block_leaves_the_first_alone() -> None:
    plain, coded, live = store(11)
    longer = coded.grown(11, 17)
    for slot in range(11, 17):
        longer.write(slot, *(part[:, :, :1] * slot for part in plain.view(11)))
    live = torch.cat([live, live.new_ones(2, 1, 6)], dim=2)
    again = code_due(longer, 17, live, bits=8, block_rows=BLOCK, pinned=PINNED)
    assert isinstance(coded, CodedRows)
    assert isinstance(again, CodedRows)
    assert again.coded_slots == coded.coded_slots + 2 * BLOCK
    for old, new in ((coded.key_blocks, again.key_blocks), (coded.value_blocks, again.value_blocks)):
        for a, b in zip(old.tensors(), new.tensors(), strict=True):
            assert torch.equal(a, b[:, :, : old.blocks])
    assert torch.equal(coded.view(11)[0], store(11)[1].view(11)[0]), "what was published stays readable"


def test_copies_moves_and_choices() -> None:
    _, coded, _ = store(17)
    shown = coded.view(17)
    for other, index in (
        (coded.copied(), [0, 1]),
        (coded.batch(torch.tensor([1, 0, 1])), [1, 0, 1]),
        (coded.to(torch.device("meta")), None),
    ):
        assert {t.data_ptr() for t in coded.tensors()}.isdisjoint(t.data_ptr() for t in other.tensors() if index)
        assert len(other.tensors()) == len(coded.tensors())
        if index is not None:
            assert all(torch.equal(a, b[index]) for a, b in zip(other.view(17), shown, strict=True))


def test_bytes_are_counted_one_by_one() -> None:
    _, coded, live = store(17, 4)
    assert isinstance(coded, CodedRows)
    whole, expected = live.expand(-1, 2, -1), 0
    for b, s in itertools.product(range(2), range(2)):
        for slot in whole[b, s].nonzero()[:, 0].tolist():
            in_block = PINNED <= slot < PINNED + coded.coded_slots
            # Codes of keys (5 channels) and values (4); scale and zero of the row's values.
            expected += 3 + 2 + 2 * 4 if in_block else 4 * (5 + 4)
        for block in range(coded.coded_slots // BLOCK):
            first = PINNED + block * BLOCK
            expected += 2 * 4 * 5 if whole[b, s, first : first + BLOCK].any() else 0
    assert coded.payload_bytes(whole) == expected
    pinned = coded.pinned_keys_BSPD
    assert pinned is not None
    measured = sum(t.untyped_storage().nbytes() for t in coded.tensors())
    assert coded.slot_bytes == measured - pinned.untyped_storage().nbytes()


# -- owners of unequal length -----------------------------------------------------------------------------------------

LENGTHS = (11, 2, 6, 17)  # two batch rows of two heads


def owners(bits: int = 8, tail: int = 2) -> tuple[RaggedRows, CodedRaggedRows, list[int], list[Tensor]]:
    """Return ragged rows, the same with what is due coded, the slots in use and which of them are live."""
    used = [length + tail for length in LENGTHS]
    plain = RaggedRows.allocate(rows(1, 5), rows(1, 4), [n + 3 for n in used], 2)
    live = [torch.ones(n, dtype=torch.bool) for n in used]
    live[0][1] = live[3][-1] = False
    for owner, n in enumerate(used):
        keys, values = plain.owner(owner, n)
        keys.copy_(rows(n, 5, seed=owner))
        values.copy_(rows(n, 4, seed=9 + owner))
    due = [due_blocks(n, BLOCK) for n in used]
    coded = code_owners(plain, used, live, due, bits=bits, block_rows=BLOCK)
    assert isinstance(coded, CodedRaggedRows)
    return plain, coded, used, live


@pytest.mark.parametrize("bits", [8, 4])
def test_every_owner_keeps_its_rows(bits: int) -> None:
    plain, coded, used, live = owners(bits)
    assert coded.blocks.counts == tuple(due_blocks(n, BLOCK) for n in used)
    first = 0
    for owner, n in enumerate(used):
        start = coded.coded[owner]
        pairs = zip(plain.owner(owner, n), coded.owner(owner, n), strict=True)
        for part, (whole, read) in enumerate(pairs):
            assert torch.equal(read[start:], whole[start:])
            store = (coded.blocks.keys, coded.blocks.values)[part]
            for slot in range(start):
                block, row = divmod(slot, BLOCK)
                scale = store.scales[0, 0, first + block, 0 if part == 0 else row]
                assert not live[owner][slot] or ((read[slot] - whole[slot]).abs() <= scale / 2 + 1e-5).all()
        first += coded.blocks.counts[owner]
    table = RaggedMap.of([(torch.arange(n, dtype=torch.int32),) * 2 for n in LENGTHS], 2)
    view = coded.view(table, 2)
    for owner, n in enumerate(used):
        assert all(torch.equal(a, b) for a, b in zip(view.owner(owner), coded.owner(owner, n), strict=True))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("poison", NOT_FINITE)
def test_one_bad_row_spoils_no_slot_of_its_owners_block(poison: float, bits: int) -> None:
    plain, _, used, live = owners()
    for part in plain.owner(3, used[3]):
        part[4] = poison
    due = [due_blocks(n, BLOCK) for n in used]
    coded = code_owners(plain, used, live, due, bits=bits, block_rows=BLOCK)
    for whole, read in zip(plain.owner(3, used[3]), coded.owner(3, used[3]), strict=True):
        check_one_bad_row(whole, read, due[3] * BLOCK, 4, bits)
    # Two rows of every block of that owner go, so that blocks are repacked: the bad row stays, and is the only one.
    stays = [slot for slot in range(used[3]) if slot >= due[3] * BLOCK or slot % BLOCK == 1]
    slots = [*(torch.arange(n) for n in used[:3]), torch.tensor(stays)]
    lengths = [own.shape[0] for own in slots]
    left = coded.taken(torch.cat(slots), lengths)
    again = code_owners(left, lengths, [torch.ones(n, dtype=torch.bool) for n in lengths], [0] * 4, bits=bits,
                        block_rows=BLOCK)  # fmt: skip
    assert isinstance(again, CodedRaggedRows)
    assert again.blocks.counts[3] < due[3]
    for whole, read in zip(coded.owner(3, used[3]), again.owner(3, lengths[3]), strict=True):
        assert torch.equal(read.isfinite(), whole[stays].isfinite())


def test_owners_are_written_grown_chosen_and_coded_again() -> None:
    _, coded, used, live = owners()
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    new = rows(2, 2, 9, 5, seed=40), rows(2, 2, 9, 4, seed=41)
    larger = coded.grown(used, [n + 9 for n in used])
    larger.write(lengths, 2, *new)
    for owner, n in enumerate(used):
        keys, values = larger.owner(owner, n + 9)
        assert torch.equal(keys[n:], new[0][owner // 2, owner % 2])
        assert torch.equal(values[n:], new[1][owner // 2, owner % 2])
        assert torch.equal(keys[:n], coded.owner(owner, n)[0])
    more = [torch.cat([own, torch.ones(9, dtype=torch.bool)]) for own in live]
    due = [due_blocks(n + 9 - done, BLOCK) for n, done in zip(used, coded.coded, strict=True)]
    again = code_owners(larger, [n + 9 for n in used], more, due, bits=8, block_rows=BLOCK)
    assert isinstance(again, CodedRaggedRows)
    assert again.blocks.counts == tuple(due_blocks(n + 9, BLOCK) for n in used)
    for owner, kept in enumerate(coded.coded):
        assert torch.equal(again.owner(owner, kept)[0], coded.owner(owner, kept)[0]), "no block is changed"
    for other, index in ((again.copied(), (0, 1)), (again.batch([1, 0, 1]), (1, 0, 1))):
        for row, source in enumerate(index):
            for head in range(2):
                n = used[source * 2 + head]
                pairs = zip(other.owner(row * 2 + head, n), again.owner(source * 2 + head, n), strict=True)
                assert all(torch.equal(a, b) for a, b in pairs)


def test_bytes_of_owners_are_counted_one_by_one() -> None:
    _, coded, used, live = owners(4)
    expected = 0
    for owner, n in enumerate(used):
        start = coded.coded[owner]
        for slot in range(n):
            expected += int(live[owner][slot]) * ((3 + 2 + 2 * 4) if slot < start else 4 * (5 + 4))
        for block in range(coded.blocks.counts[owner]):
            expected += 2 * 4 * 5 if live[owner][block * BLOCK : block * BLOCK + BLOCK].any() else 0
    assert coded.payload_bytes(live) == expected
    assert coded.slot_bytes + 4 * len(used) == sum(t.untyped_storage().nbytes() for t in coded.tensors())
