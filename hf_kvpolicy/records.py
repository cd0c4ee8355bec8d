"""The public records of a cache, built from its snapshot when somebody asks; nothing here runs on the hot path."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from .contract import (
    BudgetContract,
    KVPolicyState,
    KVVisibilityPolicyManifest,
    LazyPositions,
    PackedKVViewReceipt,
    ProtectedRule,
    QualityAndFallback,
    RecoverabilityContract,
    RepresentationContract,
    SelectionContract,
    TensorContract,
    logical_cache_abi_of,
    sha256_of,
)
from .engine import Composition, Runtime, Snapshot
from .errors import ConfigError, ManifestError, StaleGenerationError
from .geometry import CacheGeometry

__all__ = ["Identity", "manifest_of", "positions_of", "prefix_digest", "receipt_of", "state_of"]

_T = TypeVar("_T")

_PHASES = {
    "never": "none",
    "every_step": "both",
    "when_full": "both",
    "in_prefill": "prefill",
    "end_of_prefill": "prefill",
}
_CADENCES = {
    "never": "static",
    "every_step": "every_step",
    "when_full": "when_full",
    "in_prefill": "in_prefill",
    "end_of_prefill": "end_of_prefill",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whose state it is."""

    request_id: str


def manifest_of(
    policy: Composition,
    geometry: CacheGeometry,
    key_stage: str,
    dtype: torch.dtype,
    checkpoint: Callable[[], str],
    proof: str,
) -> KVVisibilityPolicyManifest:
    """Return the immutable meaning of a policy on one model; `proof` as in `registry.ModelPatch`."""
    scalar = str(dtype).removeprefix("torch.")
    tensor = TensorContract(
        num_layers=geometry.num_layers,
        num_query_heads=geometry.num_query_heads,
        num_kv_heads=geometry.num_kv_heads,
        head_dim_k=geometry.key_dim,
        head_dim_v=geometry.value_dim,
        key_dtype=scalar,
        value_dtype=scalar,
        q_to_kv_head_map=geometry.q_to_kv_head_map,
        key_position_stage=key_stage,
        attention_positions=policy.positions,
    )
    exact, merges = policy.schedule == "never", policy.representation.merges
    representation = RepresentationContract(semantic_class="full_cache_exact" if exact else "lossy_subset")
    if policy.quantizes:
        from .engine.coded import quantized_contract  # not imported where rows stay as they are

        representation = quantized_contract(policy, scalar)
    elif policy.representation.replaces_rows:
        from .replacements import contract_of

        representation = contract_of(policy.representation, geometry, scalar)
    return KVVisibilityPolicyManifest(
        policy_manifest_id=f"hf_kvpolicy/{policy.policy}",
        policy_generation=1,
        logical_cache_abi_sha256=logical_cache_abi_of(tensor),
        checkpoint=checkpoint,
        tensor_contract=tensor,
        selection_contract=_selection_of(policy, proof),
        representation_contract=representation,
        recoverability_contract=RecoverabilityContract(
            omitted="resident_visible" if exact and not merges else "omitted_irrecoverable"
        ),
        quality_and_fallback=QualityAndFallback(physical_capacity_action="full" if policy.fallback else "raise"),
    )


def _selection_of(policy: Composition, proof: str) -> SelectionContract:
    budget = policy.budget
    bounded = budget is not None and budget.kind == "rows"
    return SelectionContract(
        policy=policy.policy,
        options={
            **policy.options,
            **({} if proof == "patched" else {"model_family": proof}),
            "evidence": policy.evidence.describe(),
            "allocation": {"name": policy.allocation.name, **policy.allocation.describe()},
        },
        unit=(policy.representation.unit if budget is None else None) or policy.unit,
        owner=policy.owner,
        group=policy.group,
        decision_phase=_phase_of(policy),
        update_cadence=_cadence_of(policy),
        evidence_family=policy.evidence.name,
        budget=BudgetContract(
            declared=None if budget is None else budget.declared,
            unit="none" if budget is None else budget.kind,
            max_rows=int(budget.value) if budget is not None and bounded else None,
        ),
        protected=ProtectedRule(
            sink_rows=policy.sinks, recent_rows=_recent_rows(policy), positions=tuple(policy.protect)
        ),
        ordering="position",
    )


def _phase_of(policy: Composition) -> str:
    acts_always = policy.decode_blocks is not None or _merges_alone(policy)
    return "both" if acts_always else _PHASES[policy.schedule]


def _cadence_of(policy: Composition) -> str:
    if _merges_alone(policy):
        return "every_step"
    return _CADENCES[policy.schedule] if policy.decode_blocks is None else "periodic"


def _merges_alone(policy: Composition) -> bool:
    """Whether merging is all that a policy does; where it selects too, phase and cadence are the selection's."""
    return policy.representation.merges and policy.schedule == "never"


def _recent_rows(policy: Composition) -> int:
    budget = policy.budget
    return policy.window_for(int(budget.value)) if budget is not None and budget.kind == "rows" else policy.window_rows


def positions_of(runtime: Runtime, layer: int, batch: int) -> list[Tensor]:
    """Return ascending token positions per KV head of one layer and batch row."""
    snapshot, heads = runtime.snapshot, runtime.composition.stored_heads(runtime.geometry)
    if not snapshot.buffers or batch >= snapshot.batch_size:
        return [torch.empty(0, dtype=torch.int64) for _ in range(heads)]
    if snapshot.ragged:
        return _ragged_positions(snapshot, layer, batch, heads)
    table = snapshot.full_map(layer)
    owners = [
        table.tokens_BMW[batch, head][table.live_BMW[batch, head]].sort().values.long()
        for head in range(table.map_heads)
    ]
    return owners if len(owners) == heads else [owners[0].clone() for _ in range(heads)]


def _ragged_positions(snapshot: Snapshot, layer: int, batch: int, heads: int) -> list[Tensor]:
    stored, tail = snapshot.ragged[layer], snapshot.tail
    parts = [table.tokens_BMW[0, 0].long() for table in stored.map.owners()[batch * heads : (batch + 1) * heads]]
    if stored.trailing is not None and snapshot.tail_counts[batch]:
        # A segment that still grows ends with the newest token.
        return [torch.cat([part, part.new_tensor([snapshot.frontier.tokens[batch] - 1])]) for part in parts]
    if tail is None:
        return parts
    appended = tail.tokens_BMW[batch, 0][tail.live_BMW[batch, 0]].long()
    return [torch.cat([part, appended]) for part in parts]


def state_of(runtime: Runtime, manifest: KVVisibilityPolicyManifest, identity: Identity) -> KVPolicyState:
    """Return the published state; its positions are read from the store on first access, while they are current."""
    snapshot, policy = runtime.snapshot, runtime.composition
    numbers = snapshot.generations
    rows = snapshot.frontier.tokens or (0,)
    return KVPolicyState(
        request_id=identity.request_id,
        request_generation=numbers.request,
        cache_generation=numbers.cache,
        policy_manifest_sha256=manifest.sha256,
        policy_generation=numbers.policy,
        state_generation=numbers.state,
        parent_state_generation=_parent_state(runtime),
        source_committed_frontier=snapshot.frontier.columns,
        row_frontiers=rows,
        decision_phase=_phase_of(policy),
        decision_epoch=snapshot.decision_epoch,
        positions_source=None if policy.representation.replaces_rows else _positions_source(runtime, snapshot),
        replacement_object_ids=_store_names(manifest),
        protected_original_positions=tuple(
            tuple(token for token in policy.pinned_tokens if token < frontier) for frontier in rows
        ),
    )


def receipt_of(runtime: Runtime, manifest: KVVisibilityPolicyManifest, identity: Identity) -> PackedKVViewReceipt:
    """Return the receipt of the last publication."""
    snapshot = runtime.snapshot
    heads = runtime.composition.stored_heads(runtime.geometry)
    replaced: dict[str, Any] = {}
    if runtime.composition.representation.replaces_rows:
        from .replacements import replaced_rows_of

        replaced = {
            "representation_schema": runtime.composition.representation.name,
            "consumer_schema": manifest.representation_contract.consumer_schema,
            "replaced_source": _while_current(runtime, snapshot, replaced_rows_of),
        }
    return PackedKVViewReceipt(
        request_id=identity.request_id,
        parent=runtime.parent or snapshot.generations,
        successor=snapshot.generations,
        policy_manifest_sha256=manifest.sha256,
        frontier=snapshot.frontier.columns,
        positions_source=None if replaced else _positions_source(runtime, snapshot),
        payload_bytes=snapshot.payload_bytes(runtime.geometry.num_layers, heads),
        **replaced,
    )


def prefix_digest(runtime: Runtime, manifest: KVVisibilityPolicyManifest, token_ids: Sequence[int]) -> str:
    """Return the digest of an exact prefix: checkpoint, tensor layout and tokens (section 0x07K).

    Raises:
        ManifestError: the policy may omit rows.
        ConfigError: the cache holds several batch rows, or another number of tokens.
    """
    if manifest.representation_contract.semantic_class != "full_cache_exact":
        raise ManifestError(
            f"The policy {manifest.selection_contract.policy!r} is {manifest.representation_contract.semantic_class}: "
            "what it holds was decided by the queries it saw, or by how it was fed, so the same tokens do not make the "
            "same cache. Reuse it only for the request it belongs to (fork or branch), or keep an exact prefix in a "
            "FullCache."
        )
    tokens = runtime.snapshot.frontier.tokens
    if len(tokens) != 1 or tokens[0] != len(token_ids):
        raise ConfigError(
            f"A prefix digest describes one batch row by its tokens; the cache holds {len(tokens)} batch rows of "
            f"{list(tokens)} tokens, and {len(token_ids)} token ids were given."
        )
    return sha256_of(
        {
            "checkpoint_generation": manifest.checkpoint_generation,
            "logical_cache_abi_sha256": manifest.logical_cache_abi_sha256,
            "token_ids": [int(token) for token in token_ids],
        }
    )


def _store_names(manifest: KVVisibilityPolicyManifest) -> tuple[str, ...]:
    """Return a name for every store of rows that replace others; none where rows are original."""
    replacement = manifest.representation_contract.replacement
    stores = () if replacement is None else replacement.producer_layer_map
    return tuple(f"layer {'+'.join(map(str, layers))}" for layers in stores)


def _positions_source(runtime: Runtime, snapshot: Snapshot) -> LazyPositions:
    def read(runtime: Runtime) -> list[list[list[int]]]:
        rows = runtime.snapshot.batch_size
        return [
            [tokens.tolist() for batch in range(rows) for tokens in positions_of(runtime, layer, batch)]
            for layer in range(runtime.geometry.num_layers)
        ]

    return LazyPositions(_while_current(runtime, snapshot, read))


def _while_current(runtime: Runtime, snapshot: Snapshot, read: Callable[[Runtime], _T]) -> Callable[[], _T]:
    # Weak, and by number: a record that somebody keeps must not keep the rows of its generation.
    reference, numbers = weakref.ref(runtime), snapshot.generations

    def current() -> _T:
        runtime = reference()
        if runtime is None or runtime.snapshot.generations != numbers:
            now = (
                "is gone" if runtime is None else f"has published generation {runtime.snapshot.generations.cache} since"
            )
            raise StaleGenerationError(
                f"The positions of generation {numbers.cache} were never read, and the cache {now}. "
                "Read positions while their state is current."
            )
        return read(runtime)

    return current


def _parent_state(runtime: Runtime) -> int | None:
    parent, current = runtime.parent, runtime.snapshot.generations
    return parent.state if parent is not None and parent.state < current.state else None
