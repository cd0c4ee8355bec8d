"""What a cache declares of its policy, as coordinates of a result (0x10A)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..contract.canonical import sha256_of

__all__ = ["budget_denominator", "policy_coordinates"]

_DENOMINATORS = {
    "none": "no budget",
    "rows": "rows of one owner, in the mean over layers and heads",
    "ratio": "prompt tokens of the batch row",
    "bytes": "K/V payload of all layers, heads and batch rows",
}


def budget_denominator(unit: str) -> str:
    """What a budget of this unit ("rows", "ratio", "bytes" or "none") counts or is a share of."""
    return _DENOMINATORS[unit]


def policy_coordinates(cache: Any) -> Mapping[str, Any]:
    """What is kept, for whom, when it is decided, from which evidence and within which budget, as plain JSON.

    Read from the cache's manifest and composition, never from its name: two caches of one name may differ in any of it.
    """
    manifest, composition = cache.manifest, cache.composition
    selection, budget = manifest.selection_contract, manifest.selection_contract.budget
    profile = selection.options.get("profile")
    calibration = None if profile is None else sha256_of([profile, selection.options["allocation"]])
    return {
        "policy": selection.policy,
        "retained_object": manifest.representation_contract.rows,
        "representation": composition.representation.name,
        "semantic_class": manifest.representation_contract.semantic_class,
        "recoverability": manifest.recoverability_contract.omitted,
        "phase": selection.decision_phase,
        "cadence": selection.update_cadence,
        "owner": selection.owner,
        "unit": selection.unit,
        "group": selection.group,
        "evidence": selection.evidence_family,
        "budget": budget.declared,
        "budget_unit": budget.unit,
        "budget_scope": budget.scope,
        "budget_denominator": budget_denominator(budget.unit),
        "allocation": composition.allocation.name,
        "storage": composition.storage,
        "calibration_sha256": calibration,
        "key_position_stage": manifest.tensor_contract.key_position_stage,
        "attention_positions": manifest.tensor_contract.attention_positions,
        "manifest_sha256": manifest.sha256,
    }
