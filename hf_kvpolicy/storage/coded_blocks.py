"""Blocks of a layer's coded rows, laid anew where rows in them have died: for stores whose owners have equally many.

A block without a live row can be left out. Blocks that are at most half live can become one again, the emptiest first,
as long as one holds their rows, which are coded once more; this is done only where there are still too many blocks. All
others keep their codes. If it were done whenever it can be, a row that stays for good would be coded again with each
block that dies next to it.

Letters: B batch rows, M map heads, S stored heads, N blocks, G rows of a block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .codes import CodedTensor

__all__ = ["BlockLayout", "joined_blocks", "laid_blocks", "layouts_of", "most_blocks", "most_rows", "roomy_blocks"]

# The blocks of one owner that lie in each of its new ones.
_Groups = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockLayout:
    """Where the blocks of one map's owners lie when they are laid anew."""

    # For each new place the old one its row comes from, and whether a row is in it.
    source_BMNG: Tensor
    live_BMNG: Tensor
    # Which new blocks have rows of several, and the old block that others are.
    joined_BMN: Tensor
    block_BMN: Tensor

    @property
    def blocks(self) -> int:
        """Blocks of each owner."""
        return self.source_BMNG.shape[2]


def joined_blocks(live: Mapping[int, int], block_rows: int, allowed: int) -> _Groups:
    """Group blocks that become one: only as many as it takes to have so many, the emptiest first.

    Only blocks that are at most half live are grouped, as long as one block holds a group's rows.

    Args:
        live: the live rows of one owner's blocks that have any, by their number.
        allowed: blocks the owner may have.
    """
    groups: _Groups = []
    room, surplus = 0, len(live) - allowed
    for block in sorted((b for b, rows in live.items() if rows <= block_rows // 2), key=lambda b: (live[b], b)):
        if live[block] > room:
            groups.append([])
            room = block_rows
        elif surplus > 0:
            surplus -= 1
        else:
            break
        groups[-1].append(block)
        room -= live[block]
    return [group for group in groups if len(group) > 1]


def roomy_blocks(rows: int, block_rows: int) -> int:
    """Return how many blocks an owner of so many rows may have before any become one: one more than these fill.

    With so many, a block of rows that stay for good and one whose rows die in order are left apart. Less where all but
    one of its blocks are more than half live before that.
    """
    return min(most_blocks(rows, block_rows), -(-rows // block_rows) + 1)


def most_blocks(rows: int, block_rows: int) -> int:
    """Return the most blocks that so many rows may need where at most one of these is at most half live."""
    return rows // (block_rows // 2 + 1) + 1


def layouts_of(live: Sequence[Tensor], limit: int) -> list[BlockLayout] | None:
    """Return how the blocks of every map are laid anew; None where no owner could do with fewer of them.

    Args:
        live: of each map, which places of blocks hold a row, bool [B, M, N, G]; N is the same for all.
        limit: as many blocks stay, or the fewest above it that some owner needs or may have.
    """
    allowed = max(limit, roomy_blocks(most_rows(live), live[0].shape[3]))
    groups = [_groups(live_BMNG, allowed) for live_BMNG in live]
    needed = max(limit, *(len(own) for of_map in groups for own in of_map))
    if needed >= live[0].shape[2]:
        return None
    return [_layout(live_BMNG, of_map, needed) for live_BMNG, of_map in zip(live, groups, strict=True)]


def most_rows(live: Sequence[Tensor]) -> int:
    """Return the live rows in blocks of the owner with most, of all maps."""
    return max(int(live_BMNG.sum((-2, -1)).amax()) for live_BMNG in live)


def laid_blocks(blocks: CodedTensor, layout: BlockLayout) -> CodedTensor:
    """Return the blocks of one layer laid anew."""
    heads, device = blocks.codes_BSNGX.shape[1], blocks.codes_BSNGX.device
    joined, block, source, live = (
        part.to(device).expand(-1, heads, *part.shape[2:])
        for part in (layout.joined_BMN, layout.block_BMN, layout.source_BMNG, layout.live_BMNG)
    )
    laid = blocks.chosen(block)
    at = joined.nonzero(as_tuple=True)
    if not at[0].numel():
        return laid
    rows = blocks.decoded().flatten(2, 3)
    batch, head = (index[:, None] for index in at[:2])
    made = CodedTensor.encode(
        rows[batch, head, source[at]][None, None], live[at][None, None], bits=blocks.bits, axis=blocks.axis
    )
    parts = zip(laid.tensors(), made.tensors(), strict=True)
    return laid.of([part.index_put(at, new[0, 0]) for part, new in parts], has_voids=made.has_voids)


def _groups(live_BMNG: Tensor, allowed: int) -> list[_Groups]:
    """Return what lies in each new block, for each owner of a map."""
    block_rows, found = live_BMNG.shape[3], []
    for counts in live_BMNG.sum(-1).flatten(0, 1).tolist():
        live = {block: rows for block, rows in enumerate(counts) if rows}
        joined = joined_blocks(live, block_rows, allowed)
        gone = {block for group in joined for block in group}
        found.append([*([block] for block in live if block not in gone), *joined])
    return found


def _layout(live_BMNG: Tensor, groups: list[_Groups], needed: int) -> BlockLayout:
    batch, heads, blocks, block_rows = live_BMNG.shape
    device = live_BMNG.device
    # An owner with fewer blocks gets some without a row.
    first = [[group[0] for group in own] + [0] * (needed - len(own)) for own in groups]
    block = torch.tensor(first, dtype=torch.int64, device=device).view(batch, heads, needed)
    used = torch.tensor([len(own) for own in groups], device=device).view(batch, heads, 1)
    exists = torch.arange(needed, device=device) < used
    source = block[..., None] * block_rows + torch.arange(block_rows, device=device)
    live = live_BMNG.flatten(2, 3).gather(2, source.flatten(2, 3)).view_as(source) & exists[..., None]
    joined = torch.zeros_like(exists)
    flat_live, flat = live_BMNG.reshape(batch * heads, blocks, block_rows), (batch * heads, needed)
    for owner, own in enumerate(groups):
        for number, group in enumerate(own):
            if len(group) > 1:
                members = torch.tensor(group, device=device)
                which, place = flat_live[owner, members].nonzero(as_tuple=True)
                rows = which.shape[0]
                source.view(*flat, block_rows)[owner, number, :rows] = members[which] * block_rows + place
                live.view(*flat, block_rows)[owner, number] = torch.arange(block_rows, device=device) < rows
                joined.view(flat)[owner, number] = True
    return BlockLayout(source_BMNG=source, live_BMNG=live, joined_BMN=joined, block_BMN=block)
