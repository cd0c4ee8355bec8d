"""FastGen: which kind of policy is enough for a head (0x08H).

Source: Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs" (arXiv 2310.01801). Of the
candidate policies that recover a share of the head's attention on the prompt, the one that keeps the fewest rows wins.
The authors released no code.

Letters: N rows, P candidate policies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ConfigError
from ._checks import check_attention

__all__ = ["FULL", "Candidate", "PolicyChoice", "choose_policy", "smallest_enough"]

FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A policy that an owner could have: how many rows it keeps, and the attention it recovers."""

    name: str
    rows: int
    recovery: float


def smallest_enough(
    candidates: Sequence[Candidate], threshold: float, most_rows: int | None = None
) -> Candidate | None:
    """Return the candidate with the fewest rows, at most `most_rows`, that recovers the threshold; None if none does.

    Among candidates of the same size the first name in alphabetical order wins, as printed.
    """
    enough = [c for c in candidates if c.recovery >= threshold and (most_rows is None or c.rows <= most_rows)]
    return min(enough, key=lambda c: (c.rows, c.name), default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyChoice:
    """The chosen policy of one owner: its name, how many rows it keeps, the attention they hold, which they are."""

    name: str
    rows: int
    recovery: float
    keep_N: Tensor


def choose_policy(mass_N: Tensor, masks: Sequence[tuple[str, Tensor]], threshold: float) -> PolicyChoice:
    """Return the smallest candidate whose rows hold at least `threshold` of the attention.

    Among candidates of the same size the first name in alphabetical order wins, as printed. Where none is enough,
    rounding at a threshold of 1 included, the owner keeps its full cache.

    Args:
        mass_N: the owner's mean attention per row; it sums to 1, and is compared as it is.
        masks: (name, bool mask [N]) of every candidate, one of them "full".
        threshold: attention to recover, in [0, 1].

    Raises:
        ConfigError: threshold outside [0, 1], a name given twice, no "full", or a mask that is not bool [N].
        SelectionError: attention is negative or not finite, or there are no rows.
    """
    _check(mass_N, masks, threshold)
    names = [name for name, _ in masks]
    keep_PN = torch.stack([mask for _, mask in masks])
    rows: list[int] = keep_PN.sum(-1).tolist()
    recovery: list[float] = (keep_PN * mass_N.double()).sum(-1).tolist()
    candidates = [Candidate(name=n, rows=r, recovery=a) for n, r, a in zip(names, rows, recovery, strict=True)]
    best = smallest_enough(candidates, threshold)
    if best is None:
        full = names.index(FULL)
        return PolicyChoice(name=FULL, rows=rows[full], recovery=1.0, keep_N=keep_PN[full])
    return PolicyChoice(name=best.name, rows=best.rows, recovery=best.recovery, keep_N=keep_PN[names.index(best.name)])


def _check(mass_N: Tensor, masks: Sequence[tuple[str, Tensor]], threshold: float) -> None:
    if not 0.0 <= threshold <= 1.0:
        raise ConfigError(f"threshold={threshold!r} is no share of the attention; give a number in [0, 1].")
    names = [name for name, _ in masks]
    if FULL not in names or len(set(names)) != len(names):
        raise ConfigError(
            f"The candidates {names} must have a name of their own each, and one must be {FULL!r}: it is the fallback."
        )
    for name, mask in masks:
        if mask.dtype != torch.bool or mask.shape != mass_N.shape:
            raise ConfigError(
                f"The mask of {name!r} is {mask.dtype} {list(mask.shape)}, but attention is {list(mass_N.shape)}. "
                "Give one bool per row."
            )
    check_attention(mass_N)
