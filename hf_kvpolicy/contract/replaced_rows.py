"""What a receipt of replaced rows lists, and the checks it must pass (0x0CA-0x0CC, 0x0DE).

Every stored row names the first and last token position it stands for, in which layers. A row's anchor, the position
attention gives it, is the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

from ..errors import SelectionError
from .canonical import JsonValue
from .replacement import DEPTH_PAIRS, ReplacementContract

__all__ = ["ReplacedRows", "Span", "check_replaced_rows", "check_segments"]

Span: TypeAlias = tuple[int, int]
"""First and last token position of one stored row, both included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacedRows:
    """The stored rows of one store: what each stands for, per owner (batch row * heads + head).

    Attributes:
        layers: the layers that produced them.
        spans: [owner][rank] the tokens behind every row.
        exact_keys, exact_values: [owner] token positions whose rows are also held as they were, layer by layer; empty
            for a store that keeps none.
    """

    layers: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    exact_keys: tuple[tuple[int, ...], ...] = ()
    exact_values: tuple[tuple[int, ...], ...] = ()

    def to_json(self) -> dict[str, JsonValue]:
        """Return what a digest covers."""
        return {
            "layers": list(self.layers),
            "spans": [[list(span) for span in owner] for owner in self.spans],
            "exact_keys": [list(owner) for owner in self.exact_keys],
            "exact_values": [list(owner) for owner in self.exact_values],
        }


def check_replaced_rows(contract: ReplacementContract, rows: Sequence[ReplacedRows]) -> None:
    """Raise SelectionError unless listed rows are those of the contract's stores.

    Checked: one entry a store, spans that ascend without overlap, one token a span where rows are merged across depth,
    and exceptions that a depth pair must list and that name rows of the same owner.
    """
    found, wanted = [row.layers for row in rows], [tuple(group) for group in contract.producer_layer_map]
    if found != wanted:
        raise SelectionError(
            f"Rows of the layers {[list(layers) for layers in found]} are listed, but the contract's stores are "
            f"{[list(layers) for layers in wanted]}. A row of one pair means nothing to another."
        )
    for store in rows:
        where = f"store {store.layers[0]}"
        for owner, spans in enumerate(store.spans):
            one_token = contract.representation_kind == DEPTH_PAIRS
            _check_spans(f"{where}, owner {owner}", spans, one_token=one_token)
        if len(store.layers) == 2:
            _check_exceptions(where, store)


def _check_spans(where: str, spans: Sequence[Span], *, one_token: bool) -> None:
    if any(first > last for first, last in spans) or any(before[1] >= after[0] for before, after in pairwise(spans)):
        raise SelectionError(f"The spans of {where} do not ascend without overlap. List each source token once.")
    if one_token and any(first != last for first, last in spans):
        raise SelectionError(f"A row of {where} spans several tokens, but depth pairs merge layers, never tokens.")


def _check_exceptions(where: str, store: ReplacedRows) -> None:
    for name, exact in (("keys", store.exact_keys), ("values", store.exact_values)):
        if len(exact) != len(store.spans):
            raise SelectionError(
                f"{where} lists exact {name} of {len(exact)} owners for {len(store.spans)}; a pair without its "
                "exceptions cannot be restored. List every owner's, empty where there are none."
            )
        for owner, (positions, spans) in enumerate(zip(exact, store.spans, strict=True)):
            foreign = sorted(set(positions) - {last for _, last in spans})
            if foreign or list(positions) != sorted(set(positions)):
                raise SelectionError(
                    f"{where}, owner {owner} lists exact {name} at {list(positions)}, which are not rows of it in "
                    f"ascending order{f' ({foreign} are none)' if foreign else ''}."
                )


def check_segments(
    accumulate: Sequence[int],
    weights: Sequence[float],
    spans: Sequence[Span],
    masses: Sequence[float],
    *,
    tolerance: float = 1e-6,
) -> None:
    """Raise SelectionError unless one owner's segments follow from its decisions (0x0CB).

    Args:
        accumulate: alpha of every token: 0 begins a segment, 1 adds to the last one; the first token always begins.
        weights: omega of every token, in (0, inf).
        spans: of the stored rows.
        masses: sum of omega of each segment.
    """
    begins = [t for t, alpha in enumerate(accumulate) if not alpha or not t]
    ends = [*(t - 1 for t in begins[1:]), len(accumulate) - 1] if begins else []
    expected = list(zip(begins, ends, strict=True))
    if list(spans) != expected:
        raise SelectionError(
            f"The decisions {list(accumulate)} make the segments {expected}, but {list(spans)} are stored. 0 begins a "
            "segment and 1 adds to the last one, not the other way round."
        )
    if len(masses) != len(expected):
        raise SelectionError(f"{len(masses)} masses are stored for {len(expected)} segments. Store one for each.")
    for (first, last), mass in zip(expected, masses, strict=True):
        own = sum(weights[first : last + 1])
        if not abs(own - mass) <= tolerance * max(1.0, abs(own)):
            raise SelectionError(
                f"The segment of tokens {first} to {last} has mass {mass}, but its weights sum to {own}. A mean is "
                "divided by the mass that made it."
            )
