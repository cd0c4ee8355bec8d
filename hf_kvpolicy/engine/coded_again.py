"""Blocks of coded rows that are used again, where one row dies for each that comes.

Every owner has the same number of blocks, and what lies in them is its own. Its residual's older rows go into a block
none of whose rows lives; where it has none, but two blocks that are at most half live, the rows of both are coded once
more, into one of them, and the other is free. Another block is added only where some owner has neither: all but one of
its blocks are then more than half live, so there are never more than 2 rows of slots for a row of its budget, and two
blocks.

Letters: L maps (1 where all layers share one), B batch rows, M map heads, S stored heads, W slots, R slots of the
residual, N blocks, G rows of a block, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..representation.quantized import QuantizedRows
from ..storage import DenseRows, RowMap, gather_rows
from ..storage.coded import CodedRows, relaid
from ..storage.codes import CHANNEL_AXIS, ROW_AXIS, CodedTensor, in_blocks
from .snapshot import Snapshot

__all__ = ["renewed"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Reuse:
    """The room each owner of one map finds among its blocks."""

    # The block that takes new rows, and whether there is one.
    target_BM: Tensor
    found_BM: Tensor
    # Which owners merge two blocks into the first of them, and which of their 2 G slots it takes its rows from.
    merges_BM: Tensor
    pair_2BM: Tensor
    source_BMG: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """How the slots of one map are laid anew."""

    # The slot that each slot takes its row from, and what then lies in it.
    source_BMW: Tensor
    map: RowMap
    # The residual's slots, dead ones first, then by age; whether the first G of them are coded, and where.
    order_BMR: Tensor
    codes: bool
    reuse: _Reuse | None


def renewed(rule: QuantizedRows, pinned: int, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose residual has room for a block of rows again."""
    start, block_rows = pinned + snapshot.rows[0].coded_slots, rule.block_rows
    # Where no more rows live than stay as they are, dead slots make the room.
    codes = any(bool((part.live_BMW[:, :, start:].sum(-1) > block_rows).any()) for part in snapshot.maps)
    reuse: Sequence[_Reuse | None] = [None] * len(snapshot.maps)
    if codes and start > pinned:
        found = [_room(in_blocks(part.live_BMW[:, :, pinned:start], block_rows)) for part in snapshot.maps]
        if all(bool(each.found_BM.all()) for each in found):
            reuse = found
    layouts = [
        _layout(part, pinned, start, block_rows, codes, each) for part, each in zip(snapshot.maps, reuse, strict=True)
    ]
    of_layer = [layouts[layer if len(layouts) > 1 else 0] for layer in range(len(snapshot.rows))]
    stores = zip(snapshot.rows, of_layer, strict=True)
    scores = snapshot.scores_LBSWX
    if scores is not None:
        parts = [
            gather_rows(own, layout.source_BMW.to(own.device), own.shape[1])
            for own, layout in zip(scores.unbind(), of_layer, strict=True)
        ]
        scores = torch.stack(parts)
    return replace(
        snapshot,
        rows=tuple(_rows(rule, pinned, start, rows, layout) for rows, layout in stores),
        maps=tuple(layout.map for layout in layouts),
        scores_LBSWX=scores,
        evicted_at_column=snapshot.frontier.columns if codes else snapshot.evicted_at_column,
    )


def _room(live_BMNG: Tensor) -> _Reuse:
    """Find a block without a live row for each owner, or two that are at most half live."""
    block_rows = live_BMNG.shape[3]
    counts = live_BMNG.sum(-1)
    fewest = counts.topk(min(2, counts.shape[2]), dim=2, largest=False)
    first, second = fewest.indices[..., 0], fewest.indices[..., -1]
    is_free = fewest.values[..., 0] == 0
    merges = ~is_free & (fewest.values[..., -1] <= block_rows // 2) & (first != second)
    both = torch.cat([_block(live_BMNG, first), _block(live_BMNG, second)], dim=2)
    source = torch.argsort((~both).int(), dim=2, stable=True)[:, :, :block_rows]
    return _Reuse(
        target_BM=torch.where(merges, second, first),
        found_BM=is_free | merges,
        merges_BM=merges,
        pair_2BM=torch.stack([first, second]),
        source_BMG=source,
    )


def _layout(part: RowMap, pinned: int, start: int, block_rows: int, codes: bool, reuse: _Reuse | None) -> _Layout:
    live, tokens = part.live_BMW[:, :, start:], part.tokens_BMW[:, :, start:]
    order = torch.argsort(torch.where(live, tokens, -1), dim=2, stable=True)
    old = torch.arange(start, device=part.device).expand(*live.shape[:2], -1).clone()
    if reuse is not None:
        blocks = in_blocks(old[:, :, pinned:], block_rows)
        first, second = reuse.pair_2BM
        both = torch.cat([_block(blocks, first), _block(blocks, second)], dim=2)
        merged = torch.where(reuse.merges_BM[..., None], both.gather(2, reuse.source_BMG), _block(blocks, first))
        for at, slots in ((first, merged), (reuse.target_BM, start + order[:, :, :block_rows])):
            blocks.scatter_(2, _index(at, slots), slots[:, :, None])
    # Another block takes the first slots behind the others; elsewhere they are gone from the residual.
    left = order if codes and reuse is None else order[:, :, block_rows:]
    source = torch.cat([old, start + left], dim=2)
    return _Layout(
        source_BMW=source,
        map=part.gathered(source, torch.ones_like(source, dtype=torch.bool), ordered=False),
        order_BMR=order,
        codes=codes,
        reuse=reuse,
    )


def _rows(rule: QuantizedRows, pinned: int, start: int, rows: DenseRows, layout: _Layout) -> DenseRows:
    """Return a layer's store laid anew; blocks that no owner changes keep their codes."""
    heads, block_rows = rows.keys_BSCD.shape[1], rule.block_rows
    order = layout.order_BMR.to(rows.device)
    keys, values = (gather_rows(part, order, heads) for part in rows.held(start, order.shape[2]))
    blocks = (rows.key_blocks, rows.value_blocks) if isinstance(rows, CodedRows) else None
    if layout.codes:
        live_BMW = layout.map.live_BMW.to(rows.device)
        parts = [(keys, ROW_AXIS), (values, CHANNEL_AXIS)]
        if layout.reuse is not None and blocks is not None:
            live = in_blocks(live_BMW[:, :, pinned:start], block_rows)
            live_new = _block(live, layout.reuse.target_BM.to(rows.device))
            new = [_one_block(rule, part, live_new, axis) for part, axis in parts]
            blocks = (
                _replaced(blocks[0], new[0], layout.reuse, live),
                _replaced(blocks[1], new[1], layout.reuse, live),
            )
        else:
            live_new = live_BMW[:, :, start : start + block_rows]
            new = [_one_block(rule, part, live_new, axis) for part, axis in parts]
            blocks = (new[0], new[1]) if blocks is None else (blocks[0].then(new[0]), blocks[1].then(new[1]))
    return relaid(rows, pinned, blocks, (keys[:, :, block_rows:], values[:, :, block_rows:]))


def _one_block(rule: QuantizedRows, rows_BSRD: Tensor, live_BMG: Tensor, axis: int) -> CodedTensor:
    """Code the first rows of a residual."""
    live = live_BMG.expand(-1, rows_BSRD.shape[1], -1)[:, :, None]
    return CodedTensor.encode(rows_BSRD[:, :, None, : rule.block_rows], live, bits=rule.bits, axis=axis)


def _replaced(blocks: CodedTensor, new: CodedTensor, reuse: _Reuse, live_BMNG: Tensor) -> CodedTensor:
    """Return the blocks with two merged where an owner merges them, and the new one where it goes."""
    heads, device = blocks.codes_BSNGX.shape[1], blocks.codes_BSNGX.device
    target, merges, first, second = (
        index.to(device).expand(-1, heads) for index in (reuse.target_BM, reuse.merges_BM, *reuse.pair_2BM)
    )
    if bool(merges.any()):
        both = torch.cat([blocks.block(first).decoded(), blocks.block(second).decoded()], dim=3)
        source = reuse.source_BMG.to(device).expand(-1, heads, -1)
        rows = both.gather(3, source[:, :, None, :, None].expand(-1, -1, 1, -1, blocks.dim))
        live = _block(live_BMNG.expand(-1, heads, -1, -1), first)[:, :, None]
        merged = CodedTensor.encode(rows, live, bits=blocks.bits, axis=blocks.axis)
        blocks = blocks.replaced(first, merged, merges)
    return blocks.replaced(target, new)


def _block(part_BMNG: Tensor, index_BM: Tensor) -> Tensor:
    """Return one block per owner, [B, M, G]."""
    index = index_BM[:, :, None, None].expand(-1, -1, 1, part_BMNG.shape[3])
    return part_BMNG.gather(2, index)[:, :, 0]


def _index(at_BM: Tensor, slots_BMG: Tensor) -> Tensor:
    return at_BM[:, :, None, None].expand(-1, -1, 1, slots_BMG.shape[2])
