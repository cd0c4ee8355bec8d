"""Persistent bytes by formula: rows, payload, policy state and layouts (0x02A-0x02E, 0x07J).

All numbers are logical bytes of declared objects, never allocator or device measurements. Row counts are
nested sequences of any depth whose leaves are rows of one owner (a KV head; a query head only when it owns
its rows).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import TypeAlias

from ._checks import check_int

__all__ = [
    "LayoutRows",
    "PolicyBytes",
    "PromptLedger",
    "Ratio",
    "RowCounts",
    "flag_bytes",
    "full_payload_bytes",
    "layout_rows",
    "offset_bytes",
    "owner_counts",
    "position_map_bytes",
    "prompt_ledger",
    "row_bytes",
    "score_state_bytes",
    "token_bytes",
    "visible_payload_bytes",
]

RowCounts: TypeAlias = "Sequence[int] | Sequence[RowCounts]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """A derived metric that keeps its numerator and denominator."""

    numerator: int
    denominator: int

    @property
    def value(self) -> float | None:
        """The quotient, or None when the denominator is 0."""
        return self.numerator / self.denominator if self.denominator else None


def _check_all(minimum: int = 0, **counts: int) -> None:
    for name, value in counts.items():
        check_int(name, value, minimum=minimum)


def owner_counts(row_counts: RowCounts) -> list[int]:
    """Return the leaves of nested row counts in order."""

    def leaves(node: RowCounts | int) -> Iterator[int]:
        if isinstance(node, Sequence):
            for child in node:
                yield from leaves(child)
        else:
            check_int("row count", node)
            yield node

    return list(leaves(row_counts))


def row_bytes(*, head_dim_k: int, head_dim_v: int, key_scalar_bytes: int, value_scalar_bytes: int) -> int:
    """Bytes of one stored key row and value row: d_k * b_K + d_v * b_V (0x02A)."""
    _check_all(
        1,
        head_dim_k=head_dim_k,
        head_dim_v=head_dim_v,
        key_scalar_bytes=key_scalar_bytes,
        value_scalar_bytes=value_scalar_bytes,
    )
    return head_dim_k * key_scalar_bytes + head_dim_v * value_scalar_bytes


def token_bytes(*, layers: int, kv_heads: int, bytes_per_row: int) -> int:
    """Bytes one token of one sequence takes in all layers: L * H_kv * B_row (0x02B)."""
    _check_all(1, layers=layers, kv_heads=kv_heads, bytes_per_row=bytes_per_row)
    return layers * kv_heads * bytes_per_row


def full_payload_bytes(*, batch_rows: int = 1, layers: int, kv_heads: int, tokens: int, bytes_per_row: int) -> int:
    """Payload of a full cache: B * L * H_kv * T * B_row (0x02B)."""
    _check_all(batch_rows=batch_rows, tokens=tokens)
    return batch_rows * tokens * token_bytes(layers=layers, kv_heads=kv_heads, bytes_per_row=bytes_per_row)


def visible_payload_bytes(row_counts: RowCounts, *, bytes_per_row: int) -> int:
    """Payload of the rows that are kept: B_row times the sum over owners (0x02C)."""
    _check_all(1, bytes_per_row=bytes_per_row)
    return bytes_per_row * sum(owner_counts(row_counts))


def position_map_bytes(rows: int, *, entry_bytes: int = 4) -> int:
    """Bytes of one original position per kept row."""
    _check_all(rows=rows, entry_bytes=entry_bytes)
    return rows * entry_bytes


def offset_bytes(*, layers: int, owners_per_layer: int, flat: bool = False, entry_bytes: int = 4) -> int:
    """Bytes of row offsets: [L, owners + 1] entries (0x01A), or [L * owners + 1] if `flat` (0x07J, 0x08F)."""
    _check_all(layers=layers, owners_per_layer=owners_per_layer, entry_bytes=entry_bytes)
    entries = layers * owners_per_layer + 1 if flat else layers * (owners_per_layer + 1)
    return entries * entry_bytes


def flag_bytes(flags: int) -> int:
    """Bytes of one-bit flags (validity, protection), rounded up to whole bytes."""
    _check_all(flags=flags)
    return -(-flags // 8)


def score_state_bytes(candidate_counts: RowCounts, *, score_bytes: int = 4) -> int:
    """Bytes of one score per candidate; candidates may be more than the kept rows (0x02E)."""
    _check_all(score_bytes=score_bytes)
    return score_bytes * sum(owner_counts(candidate_counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyBytes:
    """Everything a policy keeps between two steps (0x02C)."""

    visible: int
    position: int = 0
    offset: int = 0
    validity: int = 0
    score: int = 0
    protected: int = 0
    receipt: int = 0

    def __post_init__(self) -> None:
        for f in fields(self):
            check_int(f"{f.name} bytes", getattr(self, f.name))

    @property
    def total(self) -> int:
        """The sum of all terms."""
        return sum(getattr(self, f.name) for f in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutRows:
    """Row slots that the same selection takes in three layouts (0x02D).

    Ragged stores the kept rows; padded stores the longest owner's count for every owner; tombstone keeps the
    full history and marks the dead.
    """

    ragged: int
    padded: int
    tombstone: int

    @property
    def padding_efficiency(self) -> Ratio:
        """Kept rows over padded slots."""
        return Ratio(numerator=self.ragged, denominator=self.padded)


def layout_rows(row_counts: RowCounts, *, tokens: int) -> LayoutRows:
    """Return the row slots of `row_counts` in every layout, for `tokens` committed positions (0x02D)."""
    _check_all(tokens=tokens)
    counts = owner_counts(row_counts)
    return LayoutRows(ragged=sum(counts), padded=len(counts) * max(counts, default=0), tombstone=len(counts) * tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLedger:
    """Bytes before and after one prompt compression (0x07J)."""

    full: int
    compressed: int
    position_map: int
    offsets: int
    append_per_token: int

    @property
    def reduction(self) -> Ratio:
        """Full over compressed payload."""
        return Ratio(numerator=self.full, denominator=self.compressed)


def prompt_ledger(
    *,
    batch_rows: int = 1,
    layers: int,
    owners_per_layer: int,
    prompt_tokens: int,
    kept_rows: int,
    bytes_per_row: int,
) -> PromptLedger:
    """Return the ledger of a prompt compressed to `kept_rows` for every owner.

    `owners_per_layer` is H_kv, or H_q where expanded query heads own their rows and are charged for them.
    """
    _check_all(kept_rows=kept_rows)
    per_token = full_payload_bytes(
        batch_rows=batch_rows, layers=layers, kv_heads=owners_per_layer, tokens=1, bytes_per_row=bytes_per_row
    )
    owners = batch_rows * owners_per_layer
    return PromptLedger(
        full=per_token * prompt_tokens,
        compressed=per_token * kept_rows,
        position_map=position_map_bytes(layers * owners * kept_rows),
        offsets=offset_bytes(layers=layers, owners_per_layer=owners, flat=True),
        append_per_token=per_token,
    )
