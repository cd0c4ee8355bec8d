"""How far each batch row of a cache has come.

Letters: B batch rows, F columns ever fed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .placement import Moves

__all__ = ["Frontier"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Frontier:
    """How far each batch row has come. Host numbers, so that the hot path never waits for the device."""

    columns: int = 0
    # Real tokens of each batch row.
    tokens: tuple[int, ...] = ()
    # Model position minus token position, fixed by the first forward of each row.
    position_offsets: tuple[int | None, ...] = ()
    # 2-D mask of everything fed, bool [B, F]; None while no column was ever masked.
    seen_BF: Tensor | None = None
    # Kind of every token fed, uint8 [B, F] (`engine/token_kinds.py`); None for policies that do not ask.
    kinds_BF: Tensor | None = None

    def batch(self, index: Sequence[int], index_B: Tensor) -> Frontier:
        """Return the frontier with its batch rows selected, repeated or reordered."""
        return replace(
            self,
            tokens=tuple(self.tokens[i] for i in index),
            position_offsets=tuple(self.position_offsets[i] for i in index),
            seen_BF=None if self.seen_BF is None else self.seen_BF.index_select(0, index_B.to(self.seen_BF.device)),
            kinds_BF=None if self.kinds_BF is None else self.kinds_BF.index_select(0, index_B.to(self.kinds_BF.device)),
        )

    def to(self, device: torch.device, move: Moves) -> Frontier:
        """Return the frontier with its tensors on a device."""
        seen, kinds = self.seen_BF, self.kinds_BF
        if seen is None and kinds is None:
            return self
        return replace(
            self,
            seen_BF=None if seen is None else move(seen, device),
            kinds_BF=None if kinds is None else move(kinds, device),
        )

    def cropped(self, columns: int) -> Frontier:
        """Return the frontier without the last columns."""
        lost = [columns] * len(self.tokens)
        seen = self.seen_BF
        if seen is not None:
            lost = [int(n) for n in seen[:, self.columns - columns :].sum(-1).tolist()]
            seen = seen[:, : self.columns - columns].clone()
        tokens = tuple(token - gone for token, gone in zip(self.tokens, lost, strict=True))
        kinds = None if self.kinds_BF is None else self.kinds_BF[:, : self.columns - columns].clone()
        return replace(self, columns=self.columns - columns, tokens=tokens, seen_BF=seen, kinds_BF=kinds)
