"""Plain oracle of StreamingLLM (arXiv 2309.17453, section 3.2; contract 0x05), at every frontier F:

S_sink = {0, ..., min(K_s, F) - 1}, S_recent = {max(0, F - W), ..., F - 1}, V = S_sink u S_recent, W = budget - K_s.

Protected positions are this library's addition: they stay, at the cost of recent rows.
"""

from __future__ import annotations

from collections.abc import Sequence


def kept_positions(tokens: int, budget: int, sinks: int, protect: Sequence[int] = ()) -> list[int]:
    """Return the positions published at frontier `tokens`; prompts, chunks and turns make no difference."""
    pinned = set(range(min(sinks, tokens))) | {position for position in protect if position < tokens}
    if not protect:
        recent = budget - sinks
        return sorted(pinned | set(range(max(0, tokens - recent), tokens)))
    newest_first = [position for position in range(tokens - 1, -1, -1) if position not in pinned]
    return sorted(pinned | set(newest_first[: budget - len(pinned)]))


def cache_local_positions(kept: Sequence[int]) -> dict[int, int]:
    """Return the position each kept row has inside the cache: 0..n-1 in order; the query that follows is at n."""
    return {position: rank for rank, position in enumerate(sorted(kept))}
