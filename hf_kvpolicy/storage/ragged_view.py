"""What attention reads of a ragged layer: flat slots, and where each owner's rows lie among them.

Letters: N flat slots of one layer, O owners (batch-major, o = b * S + s), B batch rows, S stored heads, n rows of one
owner, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import add

import torch
from torch import Tensor

from ..errors import IntegrityError

__all__ = ["RaggedView"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RaggedView:
    """Rows of unequal number per owner, read where they are stored. Owner o = b * heads + s.

    Slots that no owner's range names hold garbage (NaN among it) and are never read.

    Raises:
        IntegrityError: the ranges do not fit the slots, or their number is no multiple of `heads`.
    """

    keys_ND: Tensor
    values_ND: Tensor  # the head dimension of values may differ from that of keys
    heads: int  # stored heads of a batch row
    starts: tuple[int, ...]  # first slot of each owner
    lengths: tuple[int, ...]  # attended rows of each owner; 0 where a batch row holds pads only
    # The same numbers where the rows are, int32 [O], for kernels; `on_device` makes what is missing.
    starts_O: Tensor | None = None
    base_lengths_O: Tensor | None = None  # lengths before the rows this forward appends
    tail_rows: int = 0  # lengths == base lengths + tail_rows, for every owner

    def __post_init__(self) -> None:
        owners, slots = len(self.starts), self.keys_ND.shape[0]
        if not owners or len(self.lengths) != owners or owners % self.heads:
            raise IntegrityError(
                f"A ragged view has {owners} starts and {len(self.lengths)} lengths for {self.heads} heads a batch "
                "row; both must be the same whole multiple of the heads. The cache must not be read further."
            )
        used = max(map(add, self.starts, self.lengths))
        if used > slots or min(self.starts) < 0 or min(self.lengths) < 0:
            raise IntegrityError(
                f"A ragged view names slots up to {used} of {slots}, starts from {min(self.starts)} and lengths from "
                f"{min(self.lengths)}; ranges lie within the slots. The cache must not be read further."
            )

    @property
    def batch(self) -> int:
        """Batch rows."""
        return len(self.starts) // self.heads

    def owner(self, owner: int) -> tuple[Tensor, Tensor]:
        """Return keys and values of one owner, [n, D], as views."""
        start, rows = self.starts[owner], self.lengths[owner]
        return self.keys_ND.narrow(0, start, rows), self.values_ND.narrow(0, start, rows)

    def rectangle(self) -> tuple[Tensor, Tensor] | None:
        """Return keys and values as strided views [B, S, n, D], or None unless equally long and evenly spaced."""
        starts, lengths = self.starts, self.lengths
        rows, owners = lengths[0], len(starts)
        spacing = starts[1] - starts[0] if owners > 1 else rows
        if lengths.count(rows) != owners or spacing < 0:
            return None
        if any(after - before != spacing for before, after in pairwise(starts)):
            return None
        return self._strided((self.batch, self.heads), rows, starts[0], (self.heads * spacing, spacing))

    def together(self, owners: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return keys and values of some owners as strided views [len(owners), n, D].

        They must be equally long and lie at even, ascending distances, as `ragged_attention` finds them.
        """
        first, rows = self.starts[owners[0]], self.lengths[owners[0]]
        spacing = self.starts[owners[1]] - first if len(owners) > 1 else rows
        return self._strided((len(owners),), rows, first, (spacing,))

    def on_device(self) -> tuple[Tensor, Tensor]:
        """Return `starts_O` and `base_lengths_O`, copied to the rows' device where they were not given."""
        device, starts, base = self.keys_ND.device, self.starts_O, self.base_lengths_O
        if starts is None:
            starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        if base is None:
            base = torch.tensor([n - self.tail_rows for n in self.lengths], dtype=torch.int32, device=device)
        return starts, base

    def _strided(
        self, owners: tuple[int, ...], rows: int, first: int, spacings: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        return _window(self.keys_ND, owners, rows, first, spacings), _window(
            self.values_ND, owners, rows, first, spacings
        )


def _window(slots_ND: Tensor, owners: tuple[int, ...], rows: int, first: int, spacings: tuple[int, ...]) -> Tensor:
    """Return rows of owners at even distances, in slots along each axis of owners, as a view [*owners, n, D]."""
    slot, within = slots_ND.stride()
    return slots_ND.as_strided(
        (*owners, rows, slots_ND.shape[1]),
        (*(spacing * slot for spacing in spacings), slot, within),
        slots_ND.storage_offset() + first * slot,
    )
