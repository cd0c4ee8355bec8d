"""Rows that stand for others say for which, and who may read them: 0x0CA, and the rejections of 0x0DD and 0x0DE."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hf_kvpolicy.contract import (
    Generations,
    KVVisibilityPolicyManifest,
    PackedKVViewReceipt,
    ReplacedRows,
    ReplacementContract,
    RepresentationContract,
    admit_checkpoint,
    admit_policy,
    check_replaced_rows,
    check_segments,
    declared_training,
    producers_of_pairs,
    validate_selection,
)
from hf_kvpolicy.errors import CheckpointAdmissionError, ConfigError, ManifestError, SelectionError

from ._fixtures import manifest, state

BESIDE = {"magnitudes": "float32", "exception_rows": "bfloat16", "exception_indices": "int32"}


def pairs(**changes: Any) -> ReplacementContract:
    """Four layers: 0 and 1 by themselves, 2 and 3 merged."""
    fields: dict[str, Any] = {
        "representation_kind": "merged_depth_pairs",
        "producer_layer_map": [[0], [1], [2, 3]],
        "consumer_layer_map": [0, 1, 2, 2],
        "parameters": {"interpolation": 0.6},
        "side_metadata": BESIDE,
    }
    return ReplacementContract(**{**fields, **changes})


def condensed(producers: Any, consumers: Any) -> ReplacementContract:
    return ReplacementContract(
        representation_kind="condensed_layers", producer_layer_map=producers, consumer_layer_map=consumers
    )


def listed(**changes: Any) -> list[ReplacedRows]:
    alone = [ReplacedRows(layers=(layer,), spans=(((0, 0), (1, 1)),) * 2) for layer in (0, 1)]
    fields: dict[str, Any] = {
        "layers": (2, 3),
        "spans": (((0, 0), (1, 1)),) * 2,
        "exact_keys": ((1,), ()),
        "exact_values": ((), (0, 1)),
    }
    return [*alone, ReplacedRows(**{**fields, **changes})]


def test_the_teaching_graph_has_two_stores_for_six_layers() -> None:
    graph = condensed([[0], [5]], [0, 5, 5, 5, 5, 5])
    assert [graph.has_store(layer) for layer in range(6)] == [True, False, False, False, False, True]
    assert len(graph.consumer_layer_map) / len(graph.producer_layer_map) == 3
    assert graph.layers_behind(3) == (5,)
    assert graph.owner == "layer_kv_head"


def test_a_pair_is_one_store_of_two_layers() -> None:
    contract = pairs()
    assert contract.owner == "shared_layer_pair"
    assert contract.original_position_contract == "own_position"
    assert contract.layers_behind(2) == contract.layers_behind(3) == (2, 3)
    assert all(contract.has_store(layer) for layer in range(4))
    assert producers_of_pairs(4, [(2, 3)]) == contract.producer_layer_map


@pytest.mark.parametrize(
    ("producers", "consumers", "rule"),
    [
        ([[0], [5]], [0, 5, 5, 4, 5, 5], "no others"),
        ([[0], [4], [5]], [0, 5, 5, 5, 5, 5], "all of them"),
        ([[0], [5]], [5, 5, 5, 5, 5, 0], "reads the store they go into"),
        ([[0], [6]], [0, 6, 6, 6, 6, 6], "lies in 0..5"),
        ([[0], [0]], [0, 0], "named once"),
        ([], [], "named once"),
        ([[0], [4, 5]], [0, 4, 4, 4, 4, 4], "no store has two producers"),
    ],
)
def test_a_graph_that_cannot_run_is_refused(producers: Any, consumers: Any, rule: str) -> None:
    with pytest.raises(ManifestError, match=rule):
        condensed(producers, consumers)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"producer_layer_map": [[0], [1, 3], [2]], "consumer_layer_map": [0, 1, 2, 1]}, "directly above"),
        ({"producer_layer_map": [[0], [1, 2, 3]], "consumer_layer_map": [0, 1, 1, 1]}, "directly above"),
        ({"producer_layer_map": [[0], [1], [3, 2]], "consumer_layer_map": [0, 1, 3, 3]}, "directly above"),
        ({"producer_layer_map": [[0], [2, 3]], "consumer_layer_map": [0, 0, 2, 2]}, "every layer produces"),
        ({"consumer_layer_map": [0, 1, 2, 1]}, "reads the store they go into"),
        ({"side_metadata": {"magnitudes": "float32"}}, "without exception_rows, exception_indices"),
        ({"side_metadata": {}}, "without magnitudes"),
        ({"representation_kind": "slerp"}, "representation_kind must be one of"),
        ({"quantization_contract_id": "int4"}, "each in its own way"),
    ],
)
def test_a_pair_that_cannot_be_restored_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ManifestError, match=message):
        pairs(**changes)


def test_segments_need_their_masses() -> None:
    fields: dict[str, Any] = {
        "representation_kind": "merged_segments",
        "producer_layer_map": [[0], [1]],
        "consumer_layer_map": [0, 1],
    }
    assert ReplacementContract(**fields, side_metadata={"masses": "float32"}).original_position_contract == (
        "latest_of_span"
    )
    with pytest.raises(ManifestError, match="without masses"):
        ReplacementContract(**fields)


@pytest.mark.parametrize("kind", ["merged_segments", "condensed_layers"])
def test_an_ordinary_checkpoint_admits_depth_pairs_only(kind: str) -> None:
    admit_checkpoint("merged_depth_pairs")
    admit_checkpoint(kind, trained_for=kind)
    with pytest.raises(CheckpointAdmissionError, match="ordinary"):
        admit_checkpoint(kind)
    with pytest.raises(CheckpointAdmissionError, match="read wrongly"):
        admit_checkpoint("merged_depth_pairs", trained_for=kind)


class Config:
    """A config that says what its checkpoint was trained for, or does not."""

    def __init__(self, **entries: Any) -> None:
        vars(self).update(entries)


@pytest.mark.parametrize(
    ("kind", "policy"), [("merged_segments", "dmc"), ("condensed_layers", "layer_condensed")], ids=str
)
def test_policies_and_checkpoints_admit_one_another_both_ways(kind: str, policy: str) -> None:
    ordinary, trained = Config(), Config(kvpolicy={"kind": policy, "map": [1, 1]})
    admit_policy("full", None, ordinary)
    admit_policy(policy, kind, trained)
    admit_policy(policy, kind, trained, {"kind": policy, "map": [1, 1]})
    with pytest.raises(CheckpointAdmissionError, match=f"Use the policy '{policy}'"):
        admit_policy("full", None, trained)
    with pytest.raises(CheckpointAdmissionError, match="read wrongly"):
        admit_policy("minicache", "merged_depth_pairs", trained)
    with pytest.raises(CheckpointAdmissionError, match="but an ordinary one was given"):
        admit_policy(policy, kind, ordinary)
    with pytest.raises(CheckpointAdmissionError, match="Make the cache from this model"):
        admit_policy(policy, kind, trained, {"kind": policy, "map": [0, 1]})


def test_a_config_says_what_its_checkpoint_was_trained_for() -> None:
    entry = {"kind": "layer_condensed", "map": [1, 1]}
    assert declared_training(Config()) is None
    assert declared_training(Config(kvpolicy=None)) is None
    assert declared_training(Config(kvpolicy=entry)) == ("condensed_layers", entry)
    for wrong in ({}, {"kind": None}, {"kind": []}, {"kind": "something_new"}, "layer_condensed", []):
        with pytest.raises(CheckpointAdmissionError, match="names no training that is known here"):
            declared_training(Config(kvpolicy=wrong))


# -- manifest, state, receipt -----------------------------------------------------------------------------------------


def replaced_manifest() -> KVVisibilityPolicyManifest:
    representation = RepresentationContract(
        rows="replacement_rows",
        semantic_class="lossy_replacement",
        consumer_schema="depth_pair_slerp",
        replacement=pairs(),
    )
    return manifest(representation_contract=representation)


def test_the_record_is_part_of_the_manifest_and_absent_from_one_of_plain_rows() -> None:
    made = replaced_manifest()
    assert KVVisibilityPolicyManifest.from_dict(made.to_dict()) == made
    assert "replacement" not in manifest().to_dict()["representation_contract"]  # type: ignore[operator]
    other = replace(
        made, representation_contract=replace(made.representation_contract, replacement=pairs(parameters={}))
    )
    assert other != made


def test_replacement_and_class_go_together() -> None:
    with pytest.raises(ManifestError, match="replacement is missing"):
        RepresentationContract(rows="replacement_rows", semantic_class="lossy_replacement", consumer_schema="slerp")
    with pytest.raises(ManifestError, match="replacement was given"):
        RepresentationContract(replacement=pairs())


def test_a_state_of_replaced_rows_selects_no_positions() -> None:
    made = replaced_manifest()
    replaced = state(made, positions_source=None, replacement_object_ids=["layers 2 and 3"])
    assert replaced.selected_original_positions is None
    with pytest.raises(ManifestError, match="replacements"):
        _ = replaced.omitted_interval_summary
    with pytest.raises(SelectionError, match="replacements"):
        validate_selection(made, replaced)
    for wrong in ({"positions_source": None}, {"replacement_object_ids": ["layers 2 and 3"]}):
        with pytest.raises(ConfigError, match="not both"):
            state(**wrong)


def receipt(**changes: Any) -> PackedKVViewReceipt:
    fields: dict[str, Any] = {
        "request_id": "request-a",
        "parent": Generations(request=1, cache=0, policy=1, state=0),
        "successor": Generations(request=1, cache=1, policy=1, state=1),
        "policy_manifest_sha256": "0" * 64,
        "frontier": 2,
        "positions_source": None,
        "representation_schema": "merged_depth_pairs",
        "consumer_schema": "depth_pair_slerp",
        "replaced_source": listed,
    }
    return PackedKVViewReceipt(**{**fields, **changes})


def test_a_receipt_lists_what_every_row_stands_for() -> None:
    made = receipt()
    assert made.selected_original_positions is None
    assert made.rows_per_owner == ((2, 2), (2, 2), (2, 2))
    assert made.replaced_rows is not None
    assert made.replaced_rows[2].layers == (2, 3)
    assert receipt() == made


@pytest.mark.parametrize(
    "changes",
    [
        {"replaced_source": lambda: listed(layers=(1, 2))},
        {"replaced_source": lambda: listed(spans=(((0, 1),), ((0, 0), (1, 1))))},
        {"replaced_source": lambda: listed(exact_keys=((0,), ()))},
        {"consumer_schema": "another"},
    ],
)
def test_everything_listed_is_in_the_digest(changes: dict[str, Any]) -> None:
    assert receipt(**changes).digest != receipt().digest


@pytest.mark.parametrize(
    "changes",
    [
        {"positions_source": lambda: [[[0]]]},
        {"representation_schema": "original_rows"},
        {"consumer_schema": None},
        {"replaced_source": None},
    ],
)
def test_replaced_rows_are_never_advertised_as_original(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="the one or the other"):
        receipt(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (1, 2)}, "means nothing to another"),
        ({"exact_keys": ()}, "without its exceptions"),
        ({"exact_values": ((), (2,))}, r"\[2\] are none"),
        ({"exact_keys": ((1, 0), ())}, "ascending order"),
        ({"spans": (((0, 1),), ((0, 0), (1, 1)))}, "spans several tokens"),
        ({"spans": (((1, 1), (0, 0)), ((0, 0), (1, 1)))}, "without overlap"),
    ],
)
def test_lists_that_contradict_the_contract_are_refused(changes: dict[str, Any], message: str) -> None:
    check_replaced_rows(pairs(), listed())
    with pytest.raises(SelectionError, match=message):
        check_replaced_rows(pairs(), listed(**changes))


# -- segments: the trace of 0x0CC -------------------------------------------------------------------------------------

ALPHA, OMEGA = [0, 1, 0, 1, 1], [1.0, 1.0, 2.0, 1.0, 1.0]


def test_five_rows_become_two_segments() -> None:
    check_segments(ALPHA, OMEGA, [(0, 1), (2, 4)], [2.0, 4.0])
    check_segments([1, 1], [1.0, 2.0], [(0, 1)], [3.0])  # an empty cache begins whatever is decided


@pytest.mark.parametrize(
    ("alpha", "spans", "masses", "message"),
    [
        ([1 - a for a in ALPHA], [(0, 1), (2, 4)], [2.0, 4.0], "not the other way round"),
        (ALPHA, [(0, 0), (1, 2), (3, 4)], [1.0, 3.0, 2.0], "not the other way round"),
        (ALPHA, [(0, 1), (2, 4)], [2.0, 3.0], "sum to 4"),
        (ALPHA, [(0, 1), (2, 4)], [2.0, 4.0, 1.0], "3 masses"),
        (ALPHA, [(0, 1), (2, 4)], [2.0, float("nan")], "sum to 4"),
    ],
)
def test_segments_that_do_not_follow_from_decisions_are_refused(
    alpha: list[int], spans: Any, masses: list[float], message: str
) -> None:
    with pytest.raises(SelectionError, match=message):
        check_segments(alpha, OMEGA, spans, masses)
