"""Depth pairs: one stored row for one token in two layers (MiniCache, section 0x0CF-0x0CH), and which rows are not one.

A pair of rows too far apart is an *exception*: both layers' rows are kept beside the shared one and restored as they
were. The prompt fixes, for every batch row, pair, tensor and KV head, the distance from which on rows are exceptions.

Letters: B batch rows, H KV heads, T rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contract import DEPTH_PAIRS
from .rows import RowRepresentation
from .slerp import NEAR_ANTIPODAL, NEAR_PARALLEL

__all__ = ["SHORT_PROMPT_DISTANCE", "DepthPairs", "layer_pairs"]

# The threshold of a prompt too short to have one exception by its share.
SHORT_PROMPT_DISTANCE = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthPairs(RowRepresentation):
    """Which layers are merged, how, and how many of a prompt's rows are kept apart.

    Attributes:
        pairs: (lower, deeper) layers, ascending.
        interpolation: where on the arc from the lower to the deeper direction the shared one lies, in [0, 1].
        retention: share of a prompt's rows that are exceptions, in [0, 1]; 1 merges none, now and later.
    """

    pairs: tuple[tuple[int, int], ...]
    interpolation: float
    retention: float

    @property
    def kind(self) -> str:
        """Which kind of replacement it is."""
        return DEPTH_PAIRS

    @property
    def merges(self) -> bool:
        """True: a row stands for a token in two layers."""
        return True

    @property
    def has_own_step(self) -> bool:
        """False: every kind of step runs layers that share a store."""
        return False

    @property
    def unit(self) -> str:
        """Two layers share a row."""
        return "pair"

    @property
    def consumer_schema(self) -> str:
        """What a reader must know to restore a row."""
        return "slerp_depth_pairs"

    @property
    def merges_none(self) -> bool:
        """Whether every row is an exception."""
        return self.retention >= 1

    def prompt_thresholds(self, distances_BHT: Tensor, live_BT: Tensor) -> Tensor:
        """Return the distance from which on rows are exceptions, fp32 [B, H]; NaN where a batch row has no live row.

        It is the ceil(retention * T)-th largest of the T live rows. Rows nearer than `NEAR_PARALLEL` lose nothing when
        they are merged, so that the threshold is never lower.
        """
        tokens_B1 = live_BT.sum(-1, keepdim=True)
        ranks_B1 = torch.ceil(tokens_B1.double() * self.retention - 1e-9).long()
        if self.merges_none:
            found = torch.zeros_like(distances_BHT[..., 0])
        elif not self.retention:
            found = torch.full_like(distances_BHT[..., 0], torch.inf)
        else:
            falling = distances_BHT.masked_fill(~live_BT[:, None], -1.0).sort(dim=-1, descending=True).values
            rank = (ranks_B1 - 1).clamp(min=0)[:, None].expand(-1, distances_BHT.shape[1], 1)
            found = falling.gather(2, rank)[..., 0].clamp(min=NEAR_PARALLEL)
            is_short = tokens_B1.double() * self.retention < 1 - 1e-9
            found = torch.where(is_short, SHORT_PROMPT_DISTANCE, found)
        return torch.where(tokens_B1 > 0, found, torch.nan)

    def exceptions(self, distances_BHT: Tensor, thresholds_BH: Tensor, live_BT: Tensor) -> Tensor:
        """Return which rows are kept apart, bool [B, H, T]: those at or above the threshold, and what cannot merge."""
        apart = ~(distances_BHT < thresholds_BH[..., None]) | (distances_BHT > NEAR_ANTIPODAL)
        return apart & live_BT[:, None]


def layer_pairs(start_layer: int, geometry: Sequence[object]) -> tuple[tuple[int, int], ...]:
    """Return the pairs of directly following layers of equal geometry from `start_layer` on; the others stay alone."""
    pairs, layer = [], start_layer
    while layer + 1 < len(geometry):
        if geometry[layer] == geometry[layer + 1]:
            pairs.append((layer, layer + 1))
            layer += 1
        layer += 1
    return tuple(pairs)
