"""The immutable meaning of a policy (KVVisibilityPolicyManifest, 0x01A)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..errors import ManifestError
from ._checks import check_int, check_text
from .canonical import JsonValue, sha256_of
from .codec import record_from_dict, record_to_dict
from .selection_contract import SelectionContract
from .semantics import QualityAndFallback, RecoverabilityContract, RepresentationContract
from .tensor_contract import TensorContract

__all__ = ["SCHEMA_VERSION", "KVVisibilityPolicyManifest", "check_combination"]

SCHEMA_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KVVisibilityPolicyManifest:
    """What a policy means: which rows it may keep, for whom, from which evidence, and how exact that is.

    Nothing in it changes while a cache lives; selections, generations and physical places are not part of it.
    `checkpoint` is the checkpoint's fingerprint or a function computing it; the function runs once, when
    `checkpoint_generation` is first needed. Two manifests are equal when their digests are.
    Raises ManifestError for every combination that excludes itself.
    """

    schema_version: int = SCHEMA_VERSION
    policy_manifest_id: str
    policy_generation: int
    logical_cache_abi_sha256: str
    checkpoint: str | Callable[[], str] = field(metadata={"key": "checkpoint_generation"}, repr=False)
    tensor_contract: TensorContract = field(metadata={"record": TensorContract})
    selection_contract: SelectionContract = field(metadata={"record": SelectionContract})
    representation_contract: RepresentationContract = field(metadata={"record": RepresentationContract})
    recoverability_contract: RecoverabilityContract = field(metadata={"record": RecoverabilityContract})
    quality_and_fallback: QualityAndFallback = field(metadata={"record": QualityAndFallback})
    _sha256: str | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.schema_version != SCHEMA_VERSION:
            raise ManifestError(
                f"schema_version {self.schema_version!r} was given, but this library reads and writes "
                f"{SCHEMA_VERSION}. Re-create the manifest with this version of the library."
            )
        check_text("policy_manifest_id", self.policy_manifest_id, error=ManifestError)
        check_int("policy_generation", self.policy_generation, error=ManifestError)
        if not isinstance(self.logical_cache_abi_sha256, str) or not _SHA256.fullmatch(self.logical_cache_abi_sha256):
            raise ManifestError(
                f"logical_cache_abi_sha256 must be 64 lower-case hexadecimal digits, but "
                f"{self.logical_cache_abi_sha256!r} was given. Use logical_cache_abi_of(tensor_contract)."
            )
        if not callable(self.checkpoint):
            check_text("checkpoint_generation", self.checkpoint, error=ManifestError)
        check_combination(
            self.tensor_contract,
            self.selection_contract,
            self.representation_contract,
            self.recoverability_contract,
        )

    @property
    def checkpoint_generation(self) -> str:
        """The checkpoint's fingerprint, computed on first use."""
        if callable(self.checkpoint):
            fingerprint = self.checkpoint()
            check_text("checkpoint_generation", fingerprint, error=ManifestError)
            object.__setattr__(self, "checkpoint", fingerprint)
            return fingerprint
        return self.checkpoint

    @property
    def sha256(self) -> str:
        """SHA-256 of the canonical JSON of `to_dict()`, computed on first use."""
        if self._sha256 is None:
            object.__setattr__(self, "_sha256", sha256_of(self.to_dict()))
        return self._sha256 or ""

    @property
    def owners_per_layer(self) -> int:
        """Row owners in one layer of one batch row: KV heads, or query heads for owner='query_head'."""
        tensor = self.tensor_contract
        by_query = self.selection_contract.owner == "query_head"
        return tensor.num_query_heads if by_query else tensor.num_kv_heads

    def to_dict(self) -> dict[str, JsonValue]:
        """Return the manifest as plain JSON values."""
        return record_to_dict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> KVVisibilityPolicyManifest:
        """Rebuild a manifest written by `to_dict`; unknown keys raise ManifestError with a suggestion."""
        return record_from_dict(cls, data, where="manifest")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, KVVisibilityPolicyManifest):
            return NotImplemented
        return self is other or self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


def check_combination(
    tensor: TensorContract,
    selection: SelectionContract,
    representation: RepresentationContract,
    recoverability: RecoverabilityContract,
) -> None:
    """Raise ManifestError where two contracts exclude one another (the impossible combinations of 0x01A)."""
    _check_exactness(selection, representation, recoverability)
    if selection.unit in ("head", "pair") and tensor.q_to_kv_head_map is None:
        raise ManifestError(
            f"selection.unit {selection.unit!r} ({selection.specification_unit}) was declared without "
            "q_to_kv_head_map, so a query head cannot find the rows of its KV head. Give the map."
        )
    budget = selection.budget
    protected = selection.protected
    # Sinks and the recent rows are disjoint once the sequence is long; explicit positions may lie in either.
    needed = max(protected.sink_rows + protected.recent_rows, len(set(protected.positions)))
    per_owner = budget.scope == "owner" and protected.scope == "every_owner"
    if per_owner and budget.max_rows is not None and needed > budget.max_rows:
        raise ManifestError(
            f"The protected rule keeps at least {needed} rows per owner, but budget.max_rows is "
            f"{budget.max_rows}. Raise the budget or protect fewer rows."
        )


def _check_exactness(
    selection: SelectionContract,
    representation: RepresentationContract,
    recoverability: RecoverabilityContract,
) -> None:
    omits = recoverability.omitted != "resident_visible"
    if representation.semantic_class == "full_cache_exact":
        if omits:
            raise ManifestError(
                f"full_cache_exact was declared together with omission ({recoverability.omitted}), but an "
                "exact full cache omits nothing. Declare resident_visible, or lossy_subset."
            )
        if selection.budget.unit != "none" or selection.budget.max_rows is not None:
            raise ManifestError(
                "full_cache_exact was declared together with a budget, and a budget leads to omission of "
                "rows. Leave the budget out, or declare lossy_subset."
            )
    if representation.semantic_class == "lossy_quantized" and omits:
        raise ManifestError(
            f"lossy_quantized was declared together with omission ({recoverability.omitted}), but it says that every "
            "row stays. Declare lossy_subset."
        )
    if representation.semantic_class == "lossy_subset" and not omits:
        raise ManifestError(
            "lossy_subset was declared with resident_visible, but a lossy subset omits rows and must say "
            "what becomes of them. Declare omitted_irrecoverable or recallable_nonresident."
        )
