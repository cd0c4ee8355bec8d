"""Blocks of coded rows laid anew: every row is there once, with its codes unless its block was half empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.storage.coded_blocks import laid_blocks, layouts_of, most_blocks, most_rows
from hf_kvpolicy.storage.codes import CHANNEL_AXIS, ROW_AXIS, CodedTensor

BATCH, HEADS, DIM = 2, 2, 6


def reference_count(counts: list[int], allowed: int, block_rows: int) -> int:
    """Return how many blocks an owner keeps: those with rows, less what becomes one while they are too many."""
    filled = [rows for rows in counts if rows]
    blocks, together = len(filled), block_rows
    for rows in sorted(rows for rows in filled if rows <= block_rows // 2):
        fits = together + rows <= block_rows
        if fits and blocks > allowed:
            together, blocks = together + rows, blocks - 1
        else:
            together = rows
    return blocks


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**20),
    st.integers(1, 6),
    st.sampled_from([1, 2, 4, 5]),
    st.sampled_from([0.05, 0.3, 0.6, 1.0]),
    st.sampled_from([4, 8]),
    st.booleans(),
    st.data(),
)
def test_rows_stay(
    seed: int, blocks: int, size: int, share: float, bits: int, shared: bool, data: st.DataObject
) -> None:
    limit = data.draw(st.integers(0, blocks))
    random = torch.Generator().manual_seed(seed)
    heads = 1 if shared else HEADS
    live = torch.rand(BATCH, heads, blocks, size, generator=random) < share
    rows = torch.randn(BATCH, HEADS, blocks, size, DIM, generator=random)
    wide = live.expand(-1, HEADS, -1, -1)
    counts = live.sum(-1).flatten(0, 1).tolist()
    rows_most = max(map(sum, counts))
    # One more than the rows fill, and never more than if all but one are over half full.
    allowed = max(limit, min(-(-rows_most // size) + 1, rows_most // (size // 2 + 1) + 1))
    expected = max(limit, *(reference_count(own, allowed, size) for own in counts))
    layouts = layouts_of([live], limit)
    assert (layouts is None) == (expected >= blocks)
    if layouts is None:
        return
    layout = layouts[0]
    assert layout.blocks == expected
    for axis in (ROW_AXIS, CHANNEL_AXIS):
        coded = CodedTensor.encode(rows, wide, bits=bits, axis=axis)
        laid = laid_blocks(coded, layout)
        old, new = coded.decoded(), laid.decoded()
        for b in range(BATCH):
            for s in range(HEADS):
                m = 0 if shared else s
                left = {int(at) for at in live[b, m].flatten().nonzero()}
                for block in range(expected):
                    sources = layout.source_BMNG[b, m, block][layout.live_BMNG[b, m, block]].tolist()
                    joined = bool(layout.joined_BMN[b, m, block])
                    for place, at in enumerate(layout.source_BMNG[b, m, block].tolist()):
                        if not layout.live_BMNG[b, m, block, place]:
                            continue
                        left.remove(at)
                        was, now = old[b, s, at // size, at % size], new[b, s, block, place]
                        if not joined:
                            assert torch.equal(was, now)
                            continue
                        assert counts[b * heads + m][at // size] <= size // 2
                        scale = laid.scales[b, s, block, 0 if axis == ROW_AXIS else place]
                        assert ((was - now).abs() <= scale / 2 + 1e-5).all()
                    assert joined == (len({at // size for at in sources}) > 1)
                assert not left


@pytest.mark.parametrize("size", [1, 2, 4, 5, 32])
def test_blocks_are_at_most_twice_what_rows_fill(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    for blocks in range(2, 24):
        live = torch.rand(BATCH, HEADS, blocks, size, generator=random) < 0.2
        layouts = layouts_of([live], 0)
        found = blocks if layouts is None else layouts[0].blocks
        assert found <= most_blocks(most_rows([live]), size)


def test_layers_keep_as_many_blocks_as_the_one_with_most() -> None:
    one, two = (
        torch.tensor(rows, dtype=torch.bool)[None, None]
        for rows in ([[1, 1], *[[0, 0]] * 5], [[1, 1], [0, 1], [1, 0], [1, 0], [0, 1], [0, 0]])
    )
    layouts = layouts_of([one, two], 0)
    assert layouts is not None
    # Six rows fill three blocks; with five the second layer has one over those and one more.
    assert [layout.blocks for layout in layouts] == [4, 4]
    assert [layout.joined_BMN[0, 0].tolist() for layout in layouts] == [[False] * 4, [False, False, False, True]]
    layouts = layouts_of([one, two], 5)
    assert layouts is not None
    assert not any(bool(layout.joined_BMN.any()) for layout in layouts), "nothing is coded again below the limit"


def test_rows_that_stay_are_left_apart_from_those_that_die_in_order() -> None:
    """Sinks, full blocks of the newest rows and one that dies: nothing is coded again."""
    for size in (4, 8, 32):
        for dying in range(1, size):
            live = torch.ones(1, 1, 6, size, dtype=torch.bool)
            live[0, 0, 0, size // 2 :] = False
            live[0, 0, 1, :dying] = False
            layouts = layouts_of([live], 0)
            assert layouts is None


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_that_is_not_finite_spoils_no_other_when_blocks_become_one(bits: int) -> None:
    rows = torch.randn(1, 1, 3, 4, DIM, generator=torch.Generator().manual_seed(0))
    rows[0, 0, 1, 3, 2] = torch.inf
    live = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]], dtype=torch.bool)[None, None]
    for axis in (ROW_AXIS, CHANNEL_AXIS):
        layouts = layouts_of([live], 0)
        assert layouts is not None
        laid = laid_blocks(CodedTensor.encode(rows, live, bits=bits, axis=axis), layouts[0])
        # Four rows may have two blocks: the two emptiest are the second.
        read = laid.decoded()[0, 0, 1][layouts[0].live_BMNG[0, 0, 1]]
        expected = torch.stack([rows[0, 0, 1, 3], rows[0, 0, 2, 1]])
        assert torch.equal(read.isnan(), expected.isinf())
        # Coded twice: half a step of both.
        assert (read - expected).abs()[expected.isfinite()].max() <= 2 * float(laid.scales.abs().max())
