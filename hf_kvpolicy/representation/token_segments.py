"""Token segments: one stored row for consecutive tokens of one layer and KV head (DMC, section 0x0CB-0x0CC).

    alpha_t = round(sigmoid(k_t[c] - offset))            0 begins a segment, 1 adds to the last one
    omega_t = sigmoid(mean over the group of q_t[c] + offset)
    z_t     = z_(t-1) + omega_t
    k'_t    = k'_(t-1) + omega_t / z_t * (k_t - k'_(t-1))     and the same for values

The last line is the weighted mean of the specification, written so that a token of no weight changes no bit. Keys and
queries are those before their rotation, fp32; a token that begins a segment is its row and its weight the mass.

Letters: B batch rows, H KV heads, Q query heads, T tokens, S states (one before the tokens, then one after each), D
channels of keys and values together.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..contract import SEGMENTS
from .rows import RowRepresentation

__all__ = ["Decisions", "TokenSegments", "partial_means"]

# A weight below it would vanish in the sum of a segment, and a segment of such weights have no mean.
SMALLEST_WEIGHT = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Decisions:
    """What every token decides."""

    accumulates_BHT: Tensor  # bool, alpha
    weights_BHT: Tensor  # fp32, omega


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSegments(RowRepresentation):
    """Which channel of keys and queries was trained to decide.

    Attributes:
        channel: of a head, counted from 0; it is no part of attention.
        offset: what is taken from the key's logit and added to the query's.
        ratio: tokens per stored row that the checkpoint was trained for; a record, not a limit.
    """

    channel: int
    offset: float
    ratio: float

    @property
    def kind(self) -> str:
        """Which kind of replacement it is."""
        return SEGMENTS

    @property
    def merges(self) -> bool:
        """True: a row stands for consecutive tokens."""
        return True

    @property
    def consumer_schema(self) -> str:
        """What a reader must know to read a row."""
        return "weighted_token_segments"

    @property
    def storage(self) -> str:
        """Owners have as many rows as they began segments."""
        return "ragged"

    @property
    def leaves_forward(self) -> bool:
        """A token never sees the members of a closed segment, in no forward."""
        return False

    @property
    def unrotates_keys(self) -> bool:
        """Segments are means of keys before their rotation."""
        return True

    def decide(self, keys_BHTD: Tensor, queries_BQTD: Tensor) -> Decisions:
        """Return alpha and omega of tokens, from keys and queries before their rotation."""
        batch, heads, tokens, _ = keys_BHTD.shape
        importance_BHT = queries_BQTD[..., self.channel].view(batch, heads, -1, tokens).mean(2)
        return Decisions(
            # round(1/2) is 0.
            accumulates_BHT=keys_BHTD[..., self.channel] > self.offset,
            weights_BHT=(importance_BHT + self.offset).sigmoid().clamp(min=SMALLEST_WEIGHT),
        )

    def without_control(self, rows: Tensor) -> Tensor:
        """Return keys or queries with the deciding channel zeroed, a copy."""
        zeroed = rows.clone()
        zeroed[..., self.channel] = 0
        return zeroed


def partial_means(
    rows_BHSD: Tensor, weights_BHS: Tensor, begins_BHS: Tensor, live_BS: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the state after every token: the weighted mean of its segment so far, and that segment's mass.

    All segments at once: pass j adds the j-th token of each, so that a token is added in the same arithmetic whether it
    is fed alone or with others.

    Args:
        rows_BHSD: fp32; the state before the tokens first, then what each token brings.
        weights_BHS: fp32, the mass of that state, then omega.
        begins_BHS: which tokens begin a segment; the first entry counts as one.
        live_BS: which entries are no pads; a pad leaves the state as it is. None where none is one.
    """
    states, dim = rows_BHSD.shape[2], rows_BHSD.shape[3]
    index_S = torch.arange(states, device=rows_BHSD.device)
    start_BHS = torch.where(begins_BHS, index_S, 0).cummax(-1).values
    newest_BHS = index_S.expand_as(start_BHS)
    rank_BHS = newest_BHS - start_BHS
    if live_BS is not None:
        # Tokens are counted without pads, and follow the newest one before them.
        newest_BHS = torch.where(live_BS, index_S, 0).cummax(-1).values[:, None].expand_as(start_BHS)
        count_BHS = live_BS.cumsum(-1)[:, None].expand_as(start_BHS)
        rank_BHS = (count_BHS - count_BHS.gather(2, start_BHS)) * live_BS[:, None]
    owner_BH1 = torch.arange(start_BHS[..., 0].numel(), device=index_S.device).view(*start_BHS.shape[:2], 1)
    newest_N = (newest_BHS + owner_BH1 * states).flatten()
    # Stable, so that the members of one pass are read in the order they lie in.
    order_N, counts = rank_BHS.flatten().argsort(stable=True), torch.bincount(rank_BHS.flatten()).tolist()
    means_ND, masses_N = rows_BHSD.reshape(-1, dim).clone(), weights_BHS.flatten().clone()
    ends = list(accumulate(counts))
    for begin, end in pairwise(ends):
        here = order_N[begin:end]
        before = newest_N.index_select(0, here - 1)
        before_D, own = means_ND.index_select(0, before), masses_N.index_select(0, here)
        mass = masses_N.index_select(0, before) + own
        share = own / mass.clamp(min=SMALLEST_WEIGHT)
        means_ND.index_copy_(0, here, before_D + share[:, None] * (means_ND.index_select(0, here) - before_D))
        masses_N.index_copy_(0, here, mass)
    if live_BS is not None:
        means_ND, masses_N = means_ND.index_select(0, newest_N), masses_N.index_select(0, newest_N)
    return means_ND.view(rows_BHSD.shape), masses_N.view(weights_BHS.shape)
