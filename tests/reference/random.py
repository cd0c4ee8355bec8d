"""Plain oracle of random retention: the newest W rows of a segment and the best-drawn others, within the budget.

A draw is a pure function of (seed, layer, KV head, token position), given from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Draw = Callable[[int, int, int, int], float]  # seed, layer, head, token
Kept = list[list[list[int]]]  # [layer][KV head] -> ascending positions


def after_segment(
    held: Kept,
    new_tokens: int,
    tokens: int,
    draw: Draw,
    *,
    budget: int,
    window: int,
    seed: int = 0,
    unit: str = "head",
    protect: Sequence[int] = (),
) -> Kept:
    """Return what is kept once a prompt segment of `new_tokens` ended at frontier `tokens`."""
    candidates = [[[*rows, *range(tokens - new_tokens, tokens)] for rows in layer] for layer in held]
    layers, heads = len(held), len(held[0])

    def score(layer: int, head: int, token: int) -> float:
        owners = {
            "head": [(layer, head)],
            "layer": [(layer, h) for h in range(heads)],
            "token": [(i, h) for i in range(layers) for h in range(heads)],
        }[unit]
        return sum(draw(seed, i, h, token) for i, h in owners) / len(owners)

    def choose(layer: int, head: int) -> list[int]:
        rows = candidates[layer][head]
        if len(rows) <= budget:
            return rows
        always = [t for t in rows if t >= tokens - window or t in protect]
        others = sorted((t for t in rows if t not in always), key=lambda t: (-score(layer, head, t), t))
        return sorted(always + others[: budget - len(always)])

    return [[choose(layer, head) for head in range(heads)] for layer in range(layers)]


def after_decode(held: Kept, token: int) -> Kept:
    """Return what is kept after one decode token: every owner appends it."""
    return [[[*rows, token] for rows in layer] for layer in held]
