"""Of a run of new tokens, what all layers share when they merge them: which are real, and whose position a row gets.

Letters: B batch rows, T tokens, S states: one before the tokens, then one after each; state s ends with token s - 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..positions import RotarySpec, Shift
from ..storage import RowMap
from .snapshot import Frontier

__all__ = ["TokenFrame", "frame_of"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFrame:
    """New tokens, and the anchor of every state: the newest real token up to it."""

    live_BS: Tensor  # bool; the state before the tokens counts as real
    has_pads: bool
    # Which batch rows have had no token before.
    fresh_B: Tensor
    columns_BS: Tensor  # int32, -1 before the first token
    tokens_BS: Tensor  # int32, likewise
    # The model's rotation at every anchor; at every token; and what undoes that.
    there: Shift
    own: Shift
    back: Shift

    def to(self, device: torch.device) -> TokenFrame:
        """Return the frame on a layer's device; self when it lies there."""
        if device == self.live_BS.device:
            return self
        parts = {name: getattr(self, name).to(device) for name in ("live_BS", "fresh_B", "columns_BS", "tokens_BS")}
        shifts = {name: getattr(self, name).to(device) for name in ("there", "own", "back")}
        return replace(self, **shifts, **parts)


def frame_of(new: RowMap, before: Frontier, position_offsets: Sequence[int | None], spec: RotarySpec) -> TokenFrame:
    """Return the frame of tokens that follow a frontier.

    Args:
        new: their map, one map head.
        position_offsets: model position minus token position of each batch row.
    """
    device, batch = new.device, new.live_BMW.shape[0]
    old = torch.tensor(before.tokens or (0,) * batch, dtype=torch.int32, device=device)
    columns = torch.cat([_newest_column(before, batch, device)[:, None], new.columns_BMW[:, 0]], dim=1)
    tokens = torch.cat([(old - 1)[:, None], new.tokens_BMW[:, 0]], dim=1)
    live_BS = torch.cat([torch.ones_like(new.live_BMW[:, 0, :1]), new.live_BMW[:, 0]], dim=1)
    columns, tokens = (part.masked_fill(~live_BS, -1).cummax(1).values for part in (columns, tokens))
    offset_B = torch.tensor([offset or 0 for offset in position_offsets], device=device)
    there = Shift.to_positions(tokens + offset_B[:, None], spec)
    own = replace(there, cos_B1PR=there.cos_B1PR[:, :, 1:], sin_B1PR=there.sin_B1PR[:, :, 1:])
    return TokenFrame(
        live_BS=live_BS,
        has_pads=not bool(live_BS.all()),
        fresh_B=old == 0,
        columns_BS=columns.int(),
        tokens_BS=tokens.int(),
        there=there,
        own=own,
        back=own.undone(spec),
    )


def _newest_column(frontier: Frontier, batch: int, device: torch.device) -> Tensor:
    """Return the column of each batch row's newest real token, int32 [B]; -1 before the first."""
    seen = frontier.seen_BF
    if seen is None or not frontier.columns:
        return torch.full((batch,), frontier.columns - 1, dtype=torch.int32, device=device)
    numbers = torch.arange(frontier.columns, dtype=torch.int32, device=device)
    return numbers.expand(batch, -1).masked_fill(~seen.to(device), -1).amax(1)
