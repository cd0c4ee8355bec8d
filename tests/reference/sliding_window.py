"""Plain oracle of the sliding window (contract 0x04): V(F; W) = {max(0, F - W), ..., F - 1}, at every frontier F.

Protected positions are this library's addition: they stay, inside W, from the moment they were fed.
"""

from __future__ import annotations

from collections.abc import Sequence


def kept_positions(tokens: int, budget: int, protect: Sequence[int] = ()) -> list[int]:
    """Return the positions published at frontier `tokens`; prompts, chunks and turns make no difference."""
    if not protect:
        return list(range(max(0, tokens - budget), tokens))
    pinned = {position for position in protect if position < tokens}
    newest_first = [position for position in range(tokens - 1, -1, -1) if position not in pinned]
    return sorted(pinned | set(newest_first[: budget - len(pinned)]))
