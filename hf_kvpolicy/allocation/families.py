"""FastGen's families of policies for one head, and which of them is enough for it (0x08H).

Source: Ge et al., "Model Tells You What to Discard: Adaptive KV Cache Compression for LLMs" (arXiv 2310.01801). Every
family keeps special tokens; some keep punctuation, the newest rows, the rows with the most attention, or everything.

Letters: N rows of one owner, P families.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import torch
from torch import Tensor

from .recovery import FULL, Candidate, smallest_enough

__all__ = ["FAMILIES", "FULL_FAMILY", "WIDEST_FAMILY", "Family", "FamilyRule", "FamilyTerms", "HeadMass"]


@dataclass(frozen=True, slots=True)
class Family:
    """What a head keeps besides protected rows and special tokens."""

    name: str
    punctuation: bool = False
    local: bool = False
    heavy: bool = False


FAMILIES = (
    Family("special"),
    Family("special+punctuation", punctuation=True),
    Family("special+local", local=True),
    Family("special+punctuation+local", punctuation=True, local=True),
    Family("special+punctuation+heavy", punctuation=True, heavy=True),
    Family("special+punctuation+heavy+local", punctuation=True, heavy=True, local=True),
    # Every row. The parts matter under a budget: they say which rows go last.
    Family(FULL, punctuation=True, heavy=True, local=True),
)
FULL_FAMILY = len(FAMILIES) - 1
# What a head is cut down to where a budget admits nothing that recovers enough.
WIDEST_FAMILY = FULL_FAMILY - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyTerms:
    """What an owner of a family keeps now."""

    punctuation: bool
    # First token position of the newest rows.
    newest_from: int
    # How many rows may stay beyond the family's other parts; None for no limit.
    quota_rows: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadMass:
    """One owner's rows as a profile sees them."""

    # Attention received from the profiled queries, and the part that each gave to its own newest rows.
    mass_N: Tensor
    band_N: Tensor
    # Mean attention per query that saw the row.
    mean_N: Tensor
    # Rows that every family keeps; punctuation; the newest rows.
    always_N: Tensor
    punctuation_N: Tensor
    newest_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyRule:
    """How much attention a head must recover, and how large the parts of a family are, as shares of the tokens fed."""

    recovery: float
    heavy_ratio: float
    local_ratio: float

    def local_rows(self, tokens: int) -> int:
        """Return how many of the newest rows a local family keeps."""
        return max(1, int(_as_written(self.local_ratio) * tokens))

    def heavy_rows(self, tokens: int) -> int:
        """Return how many further rows a heavy family keeps."""
        return math.ceil(_as_written(self.heavy_ratio) * tokens)

    def terms(self, family: int, profile_tokens: int, tokens: int) -> FamilyTerms:
        """Return what a family means once `tokens` were fed; its sizes are those of the profile."""
        kind = FAMILIES[family]
        quota = self.heavy_rows(profile_tokens) if kind.heavy else 0
        return FamilyTerms(
            punctuation=kind.punctuation,
            newest_from=tokens - self.local_rows(profile_tokens) if kind.local else tokens,
            quota_rows=None if family == FULL_FAMILY else quota,
        )

    def choose(self, head: HeadMass, tokens: int, most_rows: int) -> int:
        """Return the family with the fewest rows, at most `most_rows`, that recovers enough attention.

        Where the limit admits none, the widest one below the full cache is chosen; its rows are then cut to the limit.
        A recovery of 1 asks for every row: rounding, or attention that underflows, is no reason to drop one.
        """
        if self.recovery >= 1.0:
            return FULL_FAMILY if head.mass_N.shape[0] <= most_rows else WIDEST_FAMILY
        candidates = self.candidates(head, tokens)
        best = smallest_enough(candidates, self.recovery, most_rows)
        return WIDEST_FAMILY if best is None else candidates.index(best)

    def candidates(self, head: HeadMass, tokens: int) -> list[Candidate]:
        """Return what each family would keep of one owner's rows, and the attention it recovers."""
        keep_PN = torch.stack([self.kept(head, family, tokens) for family in FAMILIES[:FULL_FAMILY]])
        local_P1 = torch.tensor([[family.local] for family in FAMILIES[:FULL_FAMILY]], device=keep_PN.device)
        mass, band = head.mass_N.double(), head.band_N.double()
        shares_PN = torch.where(keep_PN, mass, torch.where(local_P1, band, 0.0))
        recovered = (shares_PN.sum(-1) / mass.sum()).tolist()
        counts = keep_PN.sum(-1).tolist()
        measured = zip(FAMILIES, [*counts, head.mass_N.shape[0]], [*recovered, 1.0], strict=True)
        return [Candidate(name=family.name, rows=kept, recovery=share) for family, kept, share in measured]

    def kept(self, head: HeadMass, family: Family, tokens: int) -> Tensor:
        """Return the rows of a family below the full cache, bool [N]. Ties keep the lower position."""
        keep_N = head.always_N
        if family.punctuation:
            keep_N = keep_N | head.punctuation_N
        if family.local:
            keep_N = keep_N | head.newest_N
        if not family.heavy:
            return keep_N
        ranked = torch.where(keep_N, -1.0, head.mean_N)
        best = torch.argsort(ranked, descending=True, stable=True)[: self.heavy_rows(tokens)]
        return keep_N.index_fill(0, best, True)


@lru_cache(maxsize=64)
def _as_written(ratio: float) -> Fraction:
    """Return a ratio as the decimal it was written as; every decode step asks."""
    return Fraction(str(ratio))
