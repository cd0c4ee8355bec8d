"""What is known of one example under one cell: one JSON line of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ..errors import IntegrityError

__all__ = ["SCHEMA_VERSION", "CacheRecord", "QualityRecord", "Row", "TimingRecord"]

SCHEMA_VERSION = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityRecord:
    """What the model said. `answer_nll` is nats per gold token, fed one token at a time.

    `kl_to_full_nats` and `top1_agreement_ratio` compare with the full cache along the gold answer; None where there is
    none to compare with, and in records made before they were measured.
    """

    score: float
    answer_nll: float
    answer_top1_rate: float
    answer_tokens: int
    output_text: str
    output_tokens: int
    finish_reason: str
    kl_to_full_nats: float | None = None
    top1_agreement_ratio: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRecord:
    """What the cache really held: after the prompt, and `final_*` after the answer was generated.

    Rows are per layer and stored head. `rows_over_time_mean` is the mean over the forwards: what was held after the
    prompt, and after every token fed since; None in records made before it was measured. `full_kv_bytes` is the K/V
    payload of the same prompt in a full cache.
    """

    prompt_rows_mean: float
    prompt_rows_min: int
    prompt_rows_max: int
    final_rows_mean: float
    final_rows_max: int
    kept_ratio: float
    measured_bytes: int
    payload_bytes: int
    slack_bytes: int
    transient_peak_bytes: int
    full_kv_bytes: int
    budget_rows: int | None
    budget_binds: bool
    selections: int
    rows_dropped: int
    forwards: int
    publications: int
    manifest_sha256: str
    rows_over_time_mean: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRecord:
    """Wall-clock of the prefill and of one decode step; on a shared machine an indication only.

    `selection_s` is what it took to publish a prompt that was run once for many caches; `prefill_s` then counts that
    run too. None where the cache ran the prompt itself.
    """

    prefill_s: float
    decode_ms_per_token: float
    selection_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One example under one cell. A failed row has a reason and no quality.

    `environment` is the key of where it ran: versions, hardware and threads are kept once a run.
    `policy` says what the cache that ran declares of itself: phase, owners, representation and the like.
    """

    row_key: str
    cell_key: str
    cell: Mapping[str, Any]
    example: Mapping[str, Any]
    status: str
    environment: str
    outcome: str | None = None
    reason: str | None = None
    quality: QualityRecord | None = None
    cache: CacheRecord | None = None
    timing: TimingRecord | None = None
    policy: Mapping[str, Any] = field(default_factory=dict)
    schema_version: int = SCHEMA_VERSION

    def to_json(self) -> str:
        """One line of a samples file, without the line end; the cell stands once beside it."""
        values = {name: value for name, value in asdict(self).items() if name not in ("cell", "cell_key")}
        return json.dumps(values, sort_keys=True, ensure_ascii=False)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Row:
        """Rebuild a row from a parsed line and its cell.

        Raises:
            IntegrityError: the line was written by another schema version, or is no record.
        """
        if values.get("schema_version") != SCHEMA_VERSION:
            raise IntegrityError(
                f"A record has schema version {values.get('schema_version')}; this library reads "
                f"{SCHEMA_VERSION}. Run the sweep again into a new folder."
            )
        parts = {"quality": QualityRecord, "cache": CacheRecord, "timing": TimingRecord}
        try:
            nested = {name: part(**values[name]) for name, part in parts.items() if values[name] is not None}
            return cls(**{**values, **nested})
        except (TypeError, KeyError) as error:
            raise IntegrityError(
                f"A record does not have the fields of schema version {SCHEMA_VERSION}: {error}."
            ) from error
