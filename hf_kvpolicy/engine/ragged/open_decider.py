"""Which selection runs over ragged rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...contract import Transaction
from ..snapshot import Frontier, Snapshot
from .decide import RaggedDecider
from .families import FamilyDecider
from .pack import OwnerDecider

if TYPE_CHECKING:
    from ..runtime import Runtime

__all__ = ["open_decider"]


def open_decider(
    runtime: Runtime,
    transaction: Transaction,
    *,
    before: Snapshot,
    frontier: Frontier,
    candidates_LO: Sequence[Sequence[int]],
    budget_rows: Sequence[int],
    brought: Sequence[bool],
    ends_prompt: bool,
) -> OwnerDecider:
    """Open a selection by budgets, or by families.

    Args:
        before: what was published.
        frontier: how far each batch row has come, candidates included.
        candidates_LO: rows of each layer's owners that could stay.
        budget_rows: rows each owner may keep, for each batch row.
        brought: whether each batch row has a token in what ends here; one without keeps what it holds.
        ends_prompt: the selection closes a prompt segment (and not a decode step).
    """
    policy, geometry = runtime.composition, runtime.geometry
    if policy.families is None:
        return RaggedDecider(
            policy,
            geometry,
            transaction,
            candidates_LO=candidates_LO,
            budget_rows=budget_rows,
            newest_tokens=frontier.tokens,
            brought=brought,
        )
    return FamilyDecider(
        policy,
        policy.families,
        transaction,
        heads=policy.stored_heads(geometry),
        before=before,
        frontier=frontier,
        budget_rows=budget_rows,
        ends_prompt=ends_prompt,
    )
