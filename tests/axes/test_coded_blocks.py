"""Blocks of coded rows laid anew: every row is there once, with its codes unless its block was half empty."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_kvpolicy.storage.coded_blocks import joined_blocks, laid_blocks, layouts_of, most_blocks
from hf_kvpolicy.storage.codes import CHANNEL_AXIS, ROW_AXIS, CodedTensor

BATCH, HEADS, DIM = 2, 2, 6


def reference_count(counts: list[int], limit: int, block_rows: int) -> int:
    """Return how many blocks an owner keeps: those with rows, less what may become one while they are too many."""
    filled = [block for block, rows in enumerate(counts) if rows]
    saved = sum(len(group) - 1 for group in joined_blocks(filled, counts, block_rows))
    return max(len(filled) - saved, min(len(filled), limit))


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
    expected = max(limit, *(reference_count(own, limit, size) for own in counts))
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
def test_without_a_limit_all_blocks_but_one_are_over_half_full(size: int) -> None:
    random = torch.Generator().manual_seed(size)
    for blocks in range(2, 12):
        live = torch.rand(BATCH, HEADS, blocks, size, generator=random) < 0.4
        layouts = layouts_of([live], 0)
        left = live if layouts is None else layouts[0].live_BMNG
        per_block = left.sum(-1)
        assert (((per_block > 0) & (per_block <= size // 2)).sum(-1) <= (1 if layouts else blocks)).all()
        assert layouts is None or layouts[0].blocks <= most_blocks([live])


def test_layers_keep_as_many_blocks_as_the_one_with_most() -> None:
    one = torch.tensor([[1, 1], [0, 0], [0, 0], [1, 1]], dtype=torch.bool)[None, None]
    two = torch.tensor([[1, 1], [0, 1], [1, 0], [0, 0]], dtype=torch.bool)[None, None]
    layouts = layouts_of([one, two], 0)
    assert layouts is not None
    assert [layout.blocks for layout in layouts] == [2, 2]
    # The second layer's two blocks of one row are one.
    assert [layout.joined_BMN[0, 0].tolist() for layout in layouts] == [[False, False], [False, True]]
    layouts = layouts_of([one, two], 3)
    assert layouts is not None
    assert not any(bool(layout.joined_BMN.any()) for layout in layouts), "nothing is coded again below the limit"


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_that_is_not_finite_spoils_no_other_when_blocks_become_one(bits: int) -> None:
    rows = torch.randn(1, 1, 2, 4, DIM, generator=torch.Generator().manual_seed(0))
    rows[0, 0, 1, 3, 2] = torch.inf
    live = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 1]], dtype=torch.bool)[None, None]
    for axis in (ROW_AXIS, CHANNEL_AXIS):
        layouts = layouts_of([live], 0)
        assert layouts is not None
        laid = laid_blocks(CodedTensor.encode(rows, live, bits=bits, axis=axis), layouts[0])
        read = laid.decoded()[0, 0, 0][layouts[0].live_BMNG[0, 0, 0]]
        # The emptiest block comes first.
        expected = torch.stack([rows[0, 0, 1, 3], rows[0, 0, 0, 0], rows[0, 0, 0, 2]])
        assert torch.equal(read.isnan(), expected.isinf())
        # Coded twice: half a step of both.
        assert (read - expected).abs()[expected.isfinite()].max() <= 2 * float(laid.scales.abs().max())
