"""The manifest: identity, round trip, and every impossible combination of 0x01A."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest

from hf_kvpolicy.contract import (
    BudgetContract,
    KVVisibilityPolicyManifest,
    ProtectedRule,
    QualityAndFallback,
    RecoverabilityContract,
    RepresentationContract,
    contiguous_head_map,
)
from hf_kvpolicy.errors import ManifestError

from ._fixtures import manifest, replaced, selection_contract, tensor_contract

FULL = RepresentationContract(semantic_class="full_cache_exact")
RESIDENT = RecoverabilityContract(omitted="resident_visible")
UNBOUNDED = {"budget": BudgetContract(), "protected": ProtectedRule()}

REJECTED: dict[str, tuple[Callable[[], object], str]] = {
    "full exact with omission": (
        lambda: manifest(representation_contract=FULL, selection_contract=selection_contract(**UNBOUNDED)),
        "omission",
    ),
    "full exact with budget": (
        lambda: manifest(representation_contract=FULL, recoverability_contract=RESIDENT),
        "budget",
    ),
    "full exact with replacement": (
        lambda: RepresentationContract(semantic_class="full_cache_exact", rows="replacement_rows"),
        "replacement_rows",
    ),
    "lossy subset with replacement rows": (
        lambda: RepresentationContract(semantic_class="lossy_subset", rows="replacement_rows"),
        "lossy_subset",
    ),
    "lossy replacement with original rows": (
        lambda: RepresentationContract(semantic_class="lossy_replacement", consumer_schema="slerp"),
        "original_rows",
    ),
    "lossy replacement without schema": (
        lambda: RepresentationContract(semantic_class="lossy_replacement", rows="replacement_rows"),
        "consumer_schema",
    ),
    "schema without replacement": (
        lambda: RepresentationContract(consumer_schema="slerp"),
        "consumer_schema",
    ),
    "recallable without hand-off": (
        lambda: RecoverabilityContract(omitted="recallable_nonresident"),
        "handoff_identity",
    ),
    "hand-off without recallable": (
        lambda: RecoverabilityContract(handoff_identity="tier"),
        "handoff_identity",
    ),
    "lossy subset that omits nothing": (
        lambda: manifest(recoverability_contract=RESIDENT),
        "resident_visible",
    ),
    "per-head selection without map": (
        lambda: manifest(tensor_contract=tensor_contract(q_to_kv_head_map=None)),
        "per_layer_kv_head",
    ),
    "map of wrong length": (lambda: tensor_contract(q_to_kv_head_map=[0, 0, 1]), "length 3"),
    "owner out of range": (
        lambda: tensor_contract(q_to_kv_head_map=[0, 0, 1, 2], q_to_kv_head_mode="explicit"),
        "owner 2",
    ),
    "negative owner": (lambda: tensor_contract(q_to_kv_head_map=[0, 0, 1, -1]), "owner -1"),
    "map not contiguous": (lambda: tensor_contract(q_to_kv_head_map=[0, 1, 0, 1]), "contiguous"),
    "uneven groups": (lambda: contiguous_head_map(5, 2), "whole number"),
    "axes in another order": (
        lambda: tensor_contract(source_axes=("kv_head", "layer", "token", "channel")),
        "source_axes",
    ),
    "unknown key dtype": (lambda: tensor_contract(key_dtype="bfloat61"), "Did you mean 'bfloat16'"),
    "unknown value dtype": (lambda: tensor_contract(value_dtype="int3"), "value_dtype"),
    "bad key stage": (lambda: tensor_contract(key_position_stage="post_repo"), "Did you mean 'post_rope'"),
    "bad value stage": (lambda: tensor_contract(value_position_stage="rotated"), "value_position_stage"),
    "bad attention positions": (lambda: tensor_contract(attention_positions="packed"), "attention_positions"),
    "bad representation": (lambda: RepresentationContract(rows="rows"), "representation.rows"),
    "bad semantic class": (lambda: RepresentationContract(semantic_class="exact"), "semantic_class"),
    "bad recoverability": (lambda: RecoverabilityContract(omitted="gone"), "recoverability.omitted"),
    "no layers": (lambda: tensor_contract(num_layers=0), "num_layers"),
    "bool as a count": (lambda: tensor_contract(num_layers=True), "whole number"),
    "bad unit": (lambda: selection_contract(unit="heads"), "Did you mean 'head'"),
    "spec unit against owner": (
        lambda: selection_contract(unit="per_layer_kv_head", owner="query_head"),
        "query_head",
    ),
    "bad owner": (lambda: selection_contract(unit="head", owner="value_head"), "selection.owner"),
    "bad group": (lambda: selection_contract(group="median"), "selection.group"),
    "bad phase": (lambda: selection_contract(decision_phase="late"), "decision_phase"),
    "bad cadence": (lambda: selection_contract(update_cadence="hourly"), "update_cadence"),
    "bad ordering": (lambda: selection_contract(ordering="random"), "selection.ordering"),
    "bad duplicate rule": (lambda: selection_contract(duplicate_rule="allow"), "duplicate_rule"),
    "options outside JSON": (lambda: selection_contract(options={"f": print}), "options.f"),
    "options not a mapping": (lambda: selection_contract(options=[1]), "options"),
    "budget value without unit": (lambda: BudgetContract(declared=4), "budget.unit"),
    "budget unit without value": (lambda: BudgetContract(unit="rows"), "budget.declared"),
    "budget of no rows": (lambda: BudgetContract(declared=0, unit="rows", max_rows=0), "max_rows"),
    "protection above budget": (
        lambda: manifest(selection_contract=selection_contract(protected=ProtectedRule(sink_rows=2, recent_rows=3))),
        "protected rule",
    ),
    "negative protected position": (lambda: ProtectedRule(positions=[-1]), "protected.positions"),
    "quality gate without profile": (lambda: QualityAndFallback(minimum_quality=0.9), "evaluation_profile"),
    "invalid state only reported": (
        lambda: QualityAndFallback(invalid_state_action="report"),
        "invalid_state",
    ),
    "digest of another shape": (lambda: manifest(logical_cache_abi_sha256="abc"), "64 lower-case"),
    "future schema": (lambda: manifest(schema_version=2), "schema_version"),
    "negative policy generation": (lambda: manifest(policy_generation=-1), "policy_generation"),
    "empty checkpoint": (lambda: manifest(checkpoint=""), "checkpoint_generation"),
}


@pytest.mark.parametrize("case", REJECTED)
def test_impossible_meaning_is_rejected_at_construction(case: str) -> None:
    build, word = REJECTED[case]
    with pytest.raises(ManifestError) as caught:
        build()
    assert word in str(caught.value)


def test_each_semantic_class_has_a_legal_form() -> None:
    manifest(
        representation_contract=FULL,
        recoverability_contract=RESIDENT,
        selection_contract=selection_contract(**UNBOUNDED),
    )
    manifest(representation_contract=replaced())
    manifest(
        recoverability_contract=RecoverabilityContract(omitted="recallable_nonresident", handoff_identity="host-tier")
    )
    unmapped = tensor_contract(q_to_kv_head_map=None)
    manifest(tensor_contract=unmapped, selection_contract=selection_contract(unit="layer"))
    tensor_contract(q_to_kv_head_map=[0, 1, 0, 1], q_to_kv_head_mode="explicit")


def test_round_trip_through_json_keeps_the_identity() -> None:
    original = manifest()
    again = KVVisibilityPolicyManifest.from_dict(json.loads(json.dumps(original.to_dict())))
    assert again == original
    assert again.sha256 == original.sha256
    assert hash(again) == hash(original)
    assert copy.deepcopy(original) == original


@pytest.mark.parametrize(
    ("path", "key", "suggestion"),
    [
        ((), "policy_generatoin", "policy_generation"),
        (("selection_contract",), "evidence_famly", "evidence_family"),
        (("selection_contract", "budget"), "max_row", "max_rows"),
    ],
)
def test_unknown_keys_fail_with_a_suggestion(path: tuple[str, ...], key: str, suggestion: str) -> None:
    data = manifest().to_dict()
    target: Any = data
    for step in path:
        target = target[step]
    target[key] = 1
    with pytest.raises(ManifestError, match=f"Did you mean '{suggestion}'"):
        KVVisibilityPolicyManifest.from_dict(data)


def test_missing_key_and_wrong_type_are_named() -> None:
    data = manifest().to_dict()
    del data["policy_manifest_id"]
    with pytest.raises(ManifestError, match="lacks policy_manifest_id"):
        KVVisibilityPolicyManifest.from_dict(data)
    data = manifest().to_dict()
    data["tensor_contract"] = 3
    with pytest.raises(ManifestError, match=r"manifest\.tensor_contract must be a mapping"):
        KVVisibilityPolicyManifest.from_dict(data)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: replace(m, policy_generation=8),
        lambda m: replace(m, checkpoint="checkpoint-2"),
        lambda m: replace(m, selection_contract=selection_contract(group="max")),
        lambda m: replace(m, selection_contract=selection_contract(options={"budget": 5})),
        lambda m: replace(m, selection_contract=selection_contract(protected=ProtectedRule(positions=[7, 0]))),
        lambda m: replace(m, quality_and_fallback=QualityAndFallback(physical_capacity_action="full")),
    ],
)
def test_a_changed_meaning_changes_the_digest(
    change: Callable[[KVVisibilityPolicyManifest], KVVisibilityPolicyManifest],
) -> None:
    assert change(manifest()).sha256 != manifest().sha256


def test_the_checkpoint_fingerprint_is_computed_once_and_only_when_needed() -> None:
    calls: list[int] = []

    def fingerprint() -> str:
        calls.append(1)
        return "checkpoint-1"

    lazy = manifest(checkpoint=fingerprint)
    assert not calls
    assert lazy.sha256 == manifest().sha256
    assert lazy.checkpoint_generation == "checkpoint-1"
    assert len(calls) == 1


def test_specification_words_and_library_words_share_one_identity() -> None:
    assert selection_contract(unit="per_layer_kv_head") == selection_contract(unit="head")
    assert selection_contract(unit="head").specification_unit == "per_layer_kv_head"
    by_query = selection_contract(unit="per_layer_query_head", owner="query_head")
    assert by_query.specification_unit == "per_layer_query_head"
    assert manifest(selection_contract=by_query).owners_per_layer == 4
    assert selection_contract(unit="layer_token").unit == "layer"


def test_records_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        manifest().policy_generation = 8  # type: ignore[misc]


def test_row_bytes_follow_the_contract() -> None:
    assert tensor_contract().row_bytes == 16
    assert tensor_contract(head_dim_v=2, value_dtype="float32").row_bytes == 4 * 2 + 2 * 4
