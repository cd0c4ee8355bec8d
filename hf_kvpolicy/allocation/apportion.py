"""From real targets to whole rows: the exact total, floors and caps, the largest remainder first (0x08E).

A row goes to the owner that is furthest below its target, among equals to the first; a row is taken from the owner
that is furthest above, among equals from the last. An owner is a layer or a (layer, KV head).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from math import floor, lcm

from ..errors import BudgetError
from .exact import Number

__all__ = ["apportion", "apportion_reference"]


def apportion(targets: Sequence[Number], total: int, floors: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Return whole rows per owner that sum to min(total, sum(caps)), within floors and caps.

    The rows of `apportion_reference`, whatever `total` leaves to hand out or to take back. For fixed targets no owner
    loses a row when `total` grows.

    Args:
        targets: rows each owner should have, whatever they sum to; floats count as the exact rationals they are.
        total: rows to hand out. More than all caps together leaves every owner at its cap: there is no more to keep.
        floors: rows an owner has at least; a floor above its owner's cap is lowered to it.
        caps: rows an owner can hold at most: its candidates.

    Raises:
        BudgetError: `total` is below the sum of floors, lengths differ, or a number is negative or not finite.
    """
    exact, least = _checked(targets, total, floors, caps)
    if total >= sum(caps):
        return list(caps)
    rows = _rounded_down(exact, least, caps)
    missing = total - sum(rows)
    # In parts of a row that all targets share, remainders are integers, which sort far faster than fractions.
    parts = lcm(*(target.denominator for target in exact))
    scaled = [target.numerator * (parts // target.denominator) for target in exact]
    if missing >= 0:
        return _filled(scaled, parts, rows, caps, missing)
    # Taking rows away is adding to the mirror image: every sign and the order of owners turned round.
    mirrored = _filled([-x for x in scaled[::-1]], parts, [-x for x in rows[::-1]], [-x for x in least[::-1]], -missing)
    return [-x for x in mirrored[::-1]]


def apportion_reference(targets: Sequence[Number], total: int, floors: Sequence[int], caps: Sequence[int]) -> list[int]:
    """Plain oracle of `apportion`: one row at a time."""
    exact, least = _checked(targets, total, floors, caps)
    rows = _rounded_down(exact, least, caps)
    owners = range(len(rows))
    while sum(rows) < min(total, sum(caps)):
        can_grow = [i for i in owners if rows[i] < caps[i]]
        rows[min(can_grow, key=lambda i: (rows[i] - exact[i], i))] += 1
    while sum(rows) > total:
        can_shrink = [i for i in owners if rows[i] > least[i]]
        rows[max(can_shrink, key=lambda i: (rows[i] - exact[i], i))] -= 1
    return rows


def _rounded_down(targets: Sequence[Fraction], floors: Sequence[int], caps: Sequence[int]) -> list[int]:
    return [min(cap, max(least, floor(target))) for target, least, cap in zip(targets, floors, caps, strict=True)]


def _filled(targets: list[int], parts: int, rows: list[int], caps: Sequence[int], missing: int) -> list[int]:
    """Hand out `missing` rows; targets come in `parts` of a row.

    An owner's next rows are worth target - rows, one less each, so the rows handed out are the `missing` best of all:
    whole rows down to a common level of shortfall, found by bisection, and the last ones by remainder.
    """
    shortfall = [target // parts - row for target, row in zip(targets, rows, strict=True)]
    room = [cap - row for row, cap in zip(rows, caps, strict=True)]

    def given(level: int) -> list[int]:
        """Rows whose shortfall, before they are given, is at least `level`."""
        return [min(max(short - level + 1, 0), most) for short, most in zip(shortfall, room, strict=True)]

    # The lowest level that does not hand out too much; at `high` nothing is handed out.
    low = min((short - most for short, most in zip(shortfall, room, strict=True)), default=0)
    high = max(shortfall, default=0) + 1
    while low < high:
        middle = (low + high) // 2
        if sum(given(middle)) <= missing:
            high = middle
        else:
            low = middle + 1
    filled = [row + more for row, more in zip(rows, given(low), strict=True)]
    # The next row of these owners is worth less than `low` and at least low - 1: what is left goes by remainder.
    waiting = [i for i, row in enumerate(filled) if row < caps[i] and shortfall[i] >= low - 1]
    waiting.sort(key=lambda i: targets[i] % parts, reverse=True)
    for i in waiting[: missing - sum(filled) + sum(rows)]:
        filled[i] += 1
    return filled


def _checked(
    targets: Sequence[Number], total: int, floors: Sequence[int], caps: Sequence[int]
) -> tuple[list[Fraction], list[int]]:
    """Return exact targets, and floors that their caps allow."""
    if not len(targets) == len(floors) == len(caps):
        raise BudgetError(
            f"{len(targets)} targets, {len(floors)} floors and {len(caps)} caps were given. Give one of each per owner."
        )
    try:
        exact = [Fraction(target) for target in targets]
    except (ValueError, OverflowError, TypeError):
        raise BudgetError(f"Targets must be finite numbers of rows, but {list(targets)!r} was given.") from None
    if min(floors, default=0) < 0 or min(caps, default=0) < 0:
        raise BudgetError(
            f"Floors and caps count rows and cannot be negative, but the lowest floor is {min(floors)} and the lowest "
            f"cap is {min(caps)}. Give 0 for an owner without rows."
        )
    possible = [min(least, cap) for least, cap in zip(floors, caps, strict=True)]
    if total < sum(possible):
        raise BudgetError(
            f"A total of {total} rows cannot give {len(possible)} owners their floors, {sum(possible)} rows together. "
            f"Give a budget of at least {sum(possible)} rows, or lower floors."
        )
    return exact, possible
