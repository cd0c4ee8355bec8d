"""Blocks of a layer's coded rows, laid anew where rows in them have died: for stores whose owners have equally many.

A block without a live row can be left out. Blocks that are at most half live can become one again, the emptiest first,
as long as one holds their rows, which are coded once more; this is done only where there are still too many blocks. All
others keep their codes. If it were done whenever it can be, a row that stays for good would be coded again with each
block that dies next to it.

Letters: B batch rows, M map heads, S stored heads, N blocks, G rows of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .codes import CodedTensor

__all__ = ["BlockLayout", "joined_blocks", "laid_blocks", "layouts_of", "most_blocks", "roomy_blocks"]

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


def joined_blocks(blocks: Sequence[int], live: Sequence[int], block_rows: int) -> _Groups:
    """Group blocks that are at most half live, the emptiest first, as long as one block holds a group's rows.

    Args:
        blocks: numbers of one owner's blocks.
        live: the live rows of each block, by its number.
    """
    groups: _Groups = []
    room = 0
    for block in sorted((b for b in blocks if live[b] <= block_rows // 2), key=lambda b: (live[b], b)):
        if live[block] > room:
            groups.append([])
            room = block_rows
        groups[-1].append(block)
        room -= live[block]
    return [group for group in groups if len(group) > 1]


def layouts_of(live: Sequence[Tensor], limit: int, *, joins_above: int = 0) -> list[BlockLayout] | None:
    """Return how the blocks of every map are laid anew; None where no owner could do with fewer of them.

    Args:
        live: of each map, which places of blocks hold a row, bool [B, M, N, G]; N is the same for all.
        limit: as many blocks stay, or the fewest above it that some owner needs.
        joins_above: so many blocks an owner may need before any of them become one.
    """
    groups = [_groups(live_BMNG, max(limit, joins_above)) for live_BMNG in live]
    needed = max(limit, *(len(own) for of_map in groups for own in of_map))
    if needed >= live[0].shape[2]:
        return None
    return [_layout(live_BMNG, of_map, needed) for live_BMNG, of_map in zip(live, groups, strict=True)]


def most_blocks(live: Sequence[Tensor]) -> int:
    """Return how many blocks the owner with most rows may need where at most one of its blocks is at most half live.

    Args:
        live: as above.
    """
    return _most_rows(live) // (live[0].shape[3] // 2 + 1) + 1


def roomy_blocks(live: Sequence[Tensor]) -> int:
    """Return one block more than the owner with most rows fills, or `most_blocks` if these are fewer.

    With so many, a block of rows that stay for good and one whose rows die in order are left apart.

    Args:
        live: as above.
    """
    return min(most_blocks(live), -(-_most_rows(live) // live[0].shape[3]) + 1)


def _most_rows(live: Sequence[Tensor]) -> int:
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


def _groups(live_BMNG: Tensor, limit: int) -> list[_Groups]:
    """Return what lies in each new block, for each owner of a map: of several old ones only above the limit."""
    block_rows, found = live_BMNG.shape[3], []
    for counts in live_BMNG.sum(-1).flatten(0, 1).tolist():
        filled = [block for block, rows in enumerate(counts) if rows]
        joined: _Groups = []
        surplus = len(filled) - limit
        for group in joined_blocks(filled, counts, block_rows) if surplus > 0 else []:
            if surplus > 0:
                joined.append(group[: surplus + 1])
                surplus -= len(joined[-1]) - 1
        gone = {block for group in joined for block in group}
        found.append([*([block] for block in filled if block not in gone), *joined])
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
