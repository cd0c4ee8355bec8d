"""Plain oracle of the full cache (contract 0x03): V(F) = {0, ..., F - 1}."""

from __future__ import annotations


def kept_positions(tokens: int) -> list[int]:
    """Return the positions published once `tokens` tokens were accepted, whatever the forwards were."""
    kept: list[int] = []
    for frontier in range(tokens):
        kept = [*kept, frontier]  # V(F + 1) = V(F) u {F}
    return kept
