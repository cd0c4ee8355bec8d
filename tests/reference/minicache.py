"""MiniCache for one pair of layers, one tensor and one KV head, token by token in double precision.

Exceptions are rows whose directions are at least as far apart as the prompt's ceil(retention * T)-th farthest.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Vector = Sequence[float]
NEAR_PARALLEL, NEAR_ANTIPODAL, SHORT_PROMPT = 1e-6, 1.0 - 1e-3, 0.25


def length(x: Vector) -> float:
    return math.sqrt(sum(a * a for a in x))


def directions(x: Vector, y: Vector) -> tuple[list[float], list[float]]:
    """Unit vectors; a zero vector takes the other's direction."""
    u = [a / length(x) for a in x] if length(x) else None
    v = [a / length(y) for a in y] if length(y) else None
    return u or v or list(x), v or u or list(y)


def distance(x: Vector, y: Vector) -> float:
    """Angle over pi, by half-angles."""
    u, v = directions(x, y)
    apart = length([a - b for a, b in zip(u, v, strict=True)])
    together = length([a + b for a, b in zip(u, v, strict=True)])
    return 2 * math.atan2(apart, together) / math.pi


def shared_direction(x: Vector, y: Vector, t: float) -> list[float]:
    u, v = directions(x, y)
    d = distance(x, y)
    if NEAR_PARALLEL <= d <= NEAR_ANTIPODAL:
        angle = d * math.pi
        a, b = math.sin((1 - t) * angle) / math.sin(angle), math.sin(t * angle) / math.sin(angle)
    else:
        a, b = 1 - t, t
    e = [a * p + b * q for p, q in zip(u, v, strict=True)]
    return [p / length(e) for p in e] if length(e) else e


def restored(x: Vector, y: Vector, t: float) -> tuple[list[float], list[float]]:
    """The rows of both layers after merging."""
    e = shared_direction(x, y, t)
    return [length(x) * p for p in e], [length(y) * p for p in e]


def threshold(lower: Sequence[Vector], deeper: Sequence[Vector], retention: float) -> float:
    """Of a prompt's rows."""
    if retention >= 1:
        return 0.0
    if retention == 0:
        return math.inf
    if len(lower) * retention < 1 - 1e-9:
        return SHORT_PROMPT
    falling = sorted((distance(x, y) for x, y in zip(lower, deeper, strict=True)), reverse=True)
    return max(falling[math.ceil(len(lower) * retention - 1e-9) - 1], NEAR_PARALLEL)


def is_exception(x: Vector, y: Vector, limit: float) -> bool:
    return distance(x, y) >= limit or distance(x, y) > NEAR_ANTIPODAL


def pair_bytes(rows: int, key_exceptions: int, value_exceptions: int, head_dim: int, scalar_bytes: int) -> int:
    """Shared rows, four fp32 magnitudes a row, exceptions of both layers, their int32 indices: one KV head."""
    both = key_exceptions + value_exceptions
    return 2 * rows * head_dim * scalar_bytes + 4 * rows * 4 + 2 * head_dim * scalar_bytes * both + 4 * both
