"""The specification's two-layer, two-head fixture (0x01A), as valid records that a test mutates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hf_kvpolicy.contract import (
    BudgetContract,
    Generations,
    KVPolicyState,
    KVVisibilityPolicyManifest,
    ProtectedRule,
    QualityAndFallback,
    RecoverabilityContract,
    ReplacementContract,
    RepresentationContract,
    SelectionContract,
    TensorContract,
    logical_cache_abi_of,
)

# The table of selections is lost; it is recovered from the printed position map.
POSITIONS = [[[0, 2, 5, 7], [0, 1, 6, 7]], [[0, 3, 4, 7], [0, 2, 6, 7]]]
GENERATIONS = Generations(request=11, cache=23, policy=7, state=11)


def tensor_contract(**changes: Any) -> TensorContract:
    fields: dict[str, Any] = {
        "num_layers": 2,
        "num_query_heads": 4,
        "num_kv_heads": 2,
        "head_dim_k": 4,
        "head_dim_v": 4,
        "key_dtype": "bfloat16",
        "value_dtype": "bfloat16",
        "q_to_kv_head_map": [0, 0, 1, 1],
    }
    return TensorContract(**{**fields, **changes})


def replaced(**changes: Any) -> RepresentationContract:
    """Both layers of the fixture in one store: a depth pair."""
    pair = ReplacementContract(
        representation_kind="merged_depth_pairs",
        producer_layer_map=[[0, 1]],
        consumer_layer_map=[0, 0],
        side_metadata={"magnitudes": "float32", "exception_rows": "bfloat16", "exception_indices": "int32"},
    )
    fields: dict[str, Any] = {
        "rows": "replacement_rows",
        "semantic_class": "lossy_replacement",
        "consumer_schema": "slerp_pair",
        "replacement": pair,
    }
    return RepresentationContract(**{**fields, **changes})


def selection_contract(**changes: Any) -> SelectionContract:
    fields: dict[str, Any] = {
        "policy": "snapkv",
        "options": {"budget": 4, "window": 1, "pooling": "max"},
        "unit": "per_layer_kv_head",
        "decision_phase": "prefill",
        "update_cadence": "end_of_prefill",
        "evidence_family": "window_votes",
        "budget": BudgetContract(declared=4, unit="rows", scope="owner", max_rows=4),
        "protected": ProtectedRule(positions=[0, 7]),
    }
    return SelectionContract(**{**fields, **changes})


def manifest(**changes: Any) -> KVVisibilityPolicyManifest:
    tensor = changes.pop("tensor_contract", tensor_contract())
    fields: dict[str, Any] = {
        "policy_manifest_id": "p7",
        "policy_generation": 7,
        "logical_cache_abi_sha256": logical_cache_abi_of(tensor),
        "checkpoint": "checkpoint-1",
        "tensor_contract": tensor,
        "selection_contract": selection_contract(),
        "representation_contract": RepresentationContract(),
        "recoverability_contract": RecoverabilityContract(),
        "quality_and_fallback": QualityAndFallback(),
    }
    return KVVisibilityPolicyManifest(**{**fields, **changes})


def state(of: KVVisibilityPolicyManifest | None = None, **changes: Any) -> KVPolicyState:
    fields: dict[str, Any] = {
        "request_id": "request-a",
        "request_generation": 11,
        "cache_generation": 23,
        "policy_manifest_sha256": (of or manifest()).sha256,
        "policy_generation": 7,
        "state_generation": 11,
        "parent_state_generation": 10,
        "source_committed_frontier": 8,
        "decision_phase": "prefill",
        "decision_epoch": 0,
        "positions_source": lambda: POSITIONS,
        "protected_original_positions": [[0, 7]],
    }
    return KVPolicyState(**{**fields, **changes})


def with_positions(positions: Any) -> Callable[[KVPolicyState], KVPolicyState]:
    return lambda s: replace(s, positions_source=lambda: positions)


def symbolic_source(dtype: torch.dtype = torch.float32, tokens: int = 8, dim: int = 4) -> tuple[Tensor, Tensor]:
    """K[l,h,t,c] = 1000 l + 100 h + 10 t + c and V = K + 5000 (0x01A)."""
    layer, head, token, channel = torch.meshgrid(
        torch.arange(2), torch.arange(2), torch.arange(tokens), torch.arange(dim), indexing="ij"
    )
    keys = (1000 * layer + 100 * head + 10 * token + channel).to(dtype)
    return keys, keys + 5000
