"""Blocks of coded rows where rows die: in decode one for each that comes, in a selection all that it drops.

A row that dies in a block leaves a dead slot there, and the others keep their codes. Every owner has the same number of
blocks, and what lies in them is its own. Where rows are coded into another block, one that no row lives in is left out;
if some owner has none, there is a block more. Only an owner with over one block more than its rows fill makes one of
two that are at most half live (`storage/coded_blocks.py`). If it has no such two, all but one of its blocks are more
than half live, so there are never more than 2 rows of slots for a row of its budget, and two blocks. After a selection
from coded rows there are no more blocks than before it, or than this.

Letters: L maps (1 where all layers share one), B batch rows, M map heads, S stored heads, W slots, K slots of a
selection, R slots of the residual, N blocks, G rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..representation.quantized import QuantizedRows
from ..selection import Kept
from ..storage import DenseRows, RowMap, gather_rows, stored_tensors
from ..storage.coded import CodedRows, relaid, with_blocks
from ..storage.coded_blocks import BlockLayout, laid_blocks, layouts_of, most_blocks, most_rows
from ..storage.codes import CHANNEL_AXIS, ROW_AXIS, CodedTensor, in_blocks
from .snapshot import Snapshot

__all__ = ["drop_dead_blocks", "kept_in_blocks", "packed_behind", "renewed"]

_Part = TypeVar("_Part")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Layout:
    """How the slots of one map are laid anew."""

    # The slot that each slot takes its row from, and what then lies in it.
    source_BMW: Tensor
    map: RowMap
    # The residual's slots, dead ones first, then by age.
    order_BMR: Tensor


def kept_in_blocks(kept: Kept, coded: DenseRows, width: int) -> Kept:
    """Return the slots of a selection in which no row leaves its block.

    Pinned rows come first, then all slots of blocks, and behind them what stays of all others: dead slots first, and as
    many slots for every owner of every layer as may stay of them.

    Args:
        kept: what stays, ascending, pinned rows first.
        coded: the store of the layer, or of one with the same blocks.
        width: slots among which was chosen.
    """
    assert isinstance(coded, CodedRows), "only these have blocks"
    first, behind = coded.pinned, coded.residual
    index, live = kept.index_BMK[:, :, first:], kept.live_BMK[:, :, first:]
    in_block = (index >= first) & (index < behind) & live
    at = torch.where(in_block, index - first, behind - first)
    stays = torch.zeros((*index.shape[:2], behind - first + 1), dtype=torch.bool, device=index.device)
    stays.scatter_(2, at, True)
    others = live & ~in_block
    room = min(index.shape[2], width - (behind - first))
    order = torch.argsort(others.int(), dim=2, stable=True)[:, :, index.shape[2] - room :]
    blocks = torch.arange(first, behind, device=index.device).expand(*index.shape[:2], -1)
    return Kept(
        index_BMK=torch.cat([kept.index_BMK[:, :, :first], blocks, index.gather(2, order)], dim=2),
        live_BMK=torch.cat([kept.live_BMK[:, :, :first], stays[:, :, :-1], others.gather(2, order)], dim=2),
    )


def packed_behind(coded: DenseRows, kept: Kept, pack: Callable[[Kept, int], DenseRows]) -> DenseRows:
    """Return a layer's store of the slots that `kept_in_blocks` tells: its blocks as they are, all others packed.

    Args:
        pack: makes a store of slots, with a capacity.
    """
    assert isinstance(coded, CodedRows), "only these have blocks"
    first, behind = coded.pinned, coded.residual
    index, live = (
        torch.cat([part[:, :, :first], part[:, :, behind:]], dim=2) for part in (kept.index_BMK, kept.live_BMK)
    )
    capacity = max(index.shape[2], first + 2 * coded.block_rows)
    return with_blocks(
        pack(Kept(index_BMK=index, live_BMK=live), capacity), (coded.key_blocks, coded.value_blocks), first
    )


def drop_dead_blocks(
    before: int, rows: dict[int, DenseRows], maps: tuple[RowMap, ...], states: dict[int, Tensor]
) -> tuple[RowMap, ...]:
    """Leave out the blocks that a selection made needless; return the maps of what is left.

    Args:
        before: coded slots of each owner before the selection.
        rows: the stores of all layers, and
        states: what their rows carry; entries are replaced one by one, so that only one layer is there twice.
    """
    first = rows[0]
    if not isinstance(first, CodedRows) or not before:
        return maps
    live = _live_in_blocks(maps, first)
    most = most_blocks(most_rows(live), first.block_rows)
    layouts = layouts_of(live, min(before // first.block_rows, most))
    if layouts is None:
        return maps
    sources = [
        _source(layout, first.pinned, first.residual, part.width) for layout, part in zip(layouts, maps, strict=True)
    ]
    with stored_tensors():
        for layer in rows:
            rows[layer] = _with_blocks_laid(rows[layer], _of(layouts, layer), first.pinned)
            if layer in states:
                states[layer] = _gathered(states[layer], _of(sources, layer)[0])
    return tuple(
        part.gathered(*source, ordered=part.ordered and not bool(layout.joined_BMN.any()))
        for part, source, layout in zip(maps, sources, layouts, strict=True)
    )


def _with_blocks_laid(rows: DenseRows, layout: BlockLayout, pinned: int) -> DenseRows:
    blocks = _laid(rows, layout)
    plain = DenseRows(keys_BSCD=rows.keys_BSCD, values_BSCD=rows.values_BSCD, pinned_keys_BSPD=rows.pinned_keys_BSPD)
    return plain if blocks is None else with_blocks(plain, blocks, pinned)


def renewed(rule: QuantizedRows, pinned: int, snapshot: Snapshot) -> Snapshot:
    """Return a snapshot whose residual has room for a block of rows again."""
    start, block_rows = pinned + snapshot.rows[0].coded_slots, rule.block_rows
    # Where no more rows live than stay as they are, dead slots make the room.
    codes = any(bool((part.live_BMW[:, :, start:].sum(-1) > block_rows).any()) for part in snapshot.maps)
    first, found = snapshot.rows[0], None
    if codes and isinstance(first, CodedRows):
        found = layouts_of(_live_in_blocks(snapshot.maps, first), first.key_blocks.blocks - 1)
    blocks: Sequence[BlockLayout | None] = [None] * len(snapshot.maps) if found is None else found
    layouts = [
        _layout(part, pinned, start, 0 if codes else block_rows, each)
        for part, each in zip(snapshot.maps, blocks, strict=True)
    ]
    stores = []
    for layer, rows in enumerate(snapshot.rows):
        laid = _of(layouts, layer), _of(blocks, layer)
        stores.append(_rows(rule, pinned, start, rows, *laid, codes=codes))
    scores = snapshot.scores_LBSWX
    if scores is not None:
        own = enumerate(scores.unbind())
        scores = torch.stack([_gathered(part, _of(layouts, layer).source_BMW) for layer, part in own])
    return replace(
        snapshot,
        rows=tuple(stores),
        maps=tuple(layout.map for layout in layouts),
        scores_LBSWX=scores,
        evicted_at_column=snapshot.frontier.columns if codes else snapshot.evicted_at_column,
    )


def _live_in_blocks(maps: Sequence[RowMap], rows: CodedRows) -> list[Tensor]:
    return [in_blocks(part.live_BMW[:, :, rows.pinned : rows.residual], rows.block_rows) for part in maps]


def _source(layout: BlockLayout, pinned: int, behind: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the slot that each slot takes its row from where blocks are laid anew, and which may hold one."""
    coded, device = layout.source_BMNG.flatten(2) + pinned, layout.source_BMNG.device
    parts = [torch.arange(pinned, device=device), coded, torch.arange(behind, width, device=device)]
    shape = coded.shape[:2]
    live = [parts[0].new_ones(pinned), layout.live_BMNG.flatten(2), parts[2].new_ones(width - behind)]
    return (
        torch.cat([part.expand(*shape, -1) for part in parts], dim=2),
        torch.cat([part.bool().expand(*shape, -1) for part in live], dim=2),
    )


def _layout(part: RowMap, pinned: int, start: int, dropped: int, blocks: BlockLayout | None) -> _Layout:
    """Lay the residual by age, without its first `dropped` slots, behind blocks that may be laid anew."""
    live, tokens = part.live_BMW[:, :, start:], part.tokens_BMW[:, :, start:]
    order = torch.argsort(torch.where(live, tokens, -1), dim=2, stable=True)
    if blocks is None:
        source = torch.arange(start, device=part.device).expand(*live.shape[:2], -1)
        may_live = torch.ones_like(source, dtype=torch.bool)
    else:
        source, may_live = _source(blocks, pinned, start, start)
    left = start + order[:, :, dropped:]
    source = torch.cat([source, left], dim=2)
    may_live = torch.cat([may_live, torch.ones_like(left, dtype=torch.bool)], dim=2)
    return _Layout(source_BMW=source, map=part.gathered(source, may_live, ordered=False), order_BMR=order)


def _rows(
    rule: QuantizedRows,
    pinned: int,
    start: int,
    rows: DenseRows,
    layout: _Layout,
    anew: BlockLayout | None,
    *,
    codes: bool,
) -> DenseRows:
    """Return a layer's store laid anew; the first G slots of its residual are coded behind the blocks, or gone."""
    heads, block_rows = rows.keys_BSCD.shape[1], rule.block_rows
    order = layout.order_BMR.to(rows.device)
    parts = [gather_rows(part, order, heads) for part in rows.held(start, order.shape[2])]
    blocks = _laid(rows, anew)
    if codes:
        first = pinned + (blocks[0].blocks * block_rows if blocks is not None else 0)
        live = layout.map.live_BMW.to(rows.device)[:, :, None, first : first + block_rows].expand(-1, heads, -1, -1)
        keys, values = (
            CodedTensor.encode(part[:, :, None, :block_rows], live, bits=rule.bits, axis=axis)
            for part, axis in zip(parts, (ROW_AXIS, CHANNEL_AXIS), strict=True)
        )
        blocks = (keys, values) if blocks is None else (blocks[0].then(keys), blocks[1].then(values))
    return relaid(rows, pinned, blocks, (parts[0][:, :, block_rows:], parts[1][:, :, block_rows:]))


def _laid(rows: DenseRows, layout: BlockLayout | None) -> tuple[CodedTensor, CodedTensor] | None:
    """Return the blocks of a layer's keys and values, laid anew if a layout is given; None where there are none."""
    if not isinstance(rows, CodedRows) or (layout is not None and not layout.blocks):
        return None
    if layout is None:
        return rows.key_blocks, rows.value_blocks
    return laid_blocks(rows.key_blocks, layout), laid_blocks(rows.value_blocks, layout)


def _of(parts: Sequence[_Part], layer: int) -> _Part:
    """Return what a layer has for itself, or shares with all others."""
    return parts[layer if len(parts) > 1 else 0]


def _gathered(states_BSWX: Tensor, source_BMW: Tensor) -> Tensor:
    return gather_rows(states_BSWX, source_BMW.to(states_BSWX.device), states_BSWX.shape[1])
