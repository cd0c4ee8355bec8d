"""DMC token by token: which segments decisions make (0x0CB), in plain numbers.

A token begins a segment where alpha is 0, or where there is none yet; else it joins the last one. A segment's key and
value are the means of its tokens' own, weighted by omega.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Vector = list[float]


@dataclass
class Segment:
    """One stored row."""

    key: Vector
    value: Vector
    mass: float
    span: tuple[int, int]

    @property
    def anchor(self) -> int:
        return self.span[1]


def updated(
    segments: Sequence[Segment], token: int, alpha: int, omega: float, key: Vector, value: Vector
) -> list[Segment]:
    """The recurrence as it is printed."""
    if not alpha or not segments:
        return [*segments, Segment(list(key), list(value), omega, (token, token))]
    tail = segments[-1]
    mass = tail.mass + omega
    merged = Segment(
        [(tail.mass * a + omega * b) / mass for a, b in zip(tail.key, key, strict=True)],
        [(tail.mass * a + omega * b) / mass for a, b in zip(tail.value, value, strict=True)],
        mass,
        (tail.span[0], token),
    )
    return [*segments[:-1], merged]


def segments_of(
    alphas: Sequence[int], omegas: Sequence[float], keys: Sequence[Vector], values: Sequence[Vector]
) -> list[Segment]:
    found: list[Segment] = []
    for token, (alpha, omega, key, value) in enumerate(zip(alphas, omegas, keys, values, strict=True)):
        found = updated(found, token, alpha, omega, key, value)
    return found


def closed_form(omegas: Sequence[float], rows: Sequence[Vector], span: tuple[int, int]) -> Vector:
    """The weighted mean of a span's rows, summed exactly."""
    members = range(span[0], span[1] + 1)
    total = math.fsum(omegas[t] for t in members)
    return [math.fsum(omegas[t] * rows[t][d] for t in members) / total for d in range(len(rows[0]))]


def decision(key_logit: float, query_logits: Sequence[float], offset: float) -> tuple[int, float]:
    """(alpha, omega) of one token and KV head."""
    importance = sum(query_logits) / len(query_logits) + offset
    return round(1 / (1 + math.exp(offset - key_logit))), 1 / (1 + math.exp(-importance))
