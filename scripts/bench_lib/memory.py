"""Bytes: what a cache holds against the formula, and a prefill's peak as ledger and system see it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from hf_kvpolicy.geometry import CacheGeometry

from .models import POLICIES, RAGGED, batch_ids, forward, new_cache
from .report import Measure

PEAK_TARGET = 0.2
RSS_TARGET = 0.6


def formula_bytes(model: Any, batch: int, rows: int) -> int:
    """K/V bytes of `rows` rows in every KV head of every layer."""
    geometry = CacheGeometry.from_config(model.config)
    return batch * geometry.num_layers * geometry.num_kv_heads * rows * geometry.row_bytes(model.dtype.itemsize)


def dynamic_cache_bytes(cache: Any) -> int:
    """K/V bytes of transformers' own cache, from its storages."""
    tensors = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def byte_measures(model: Any, filler: list[int], batch: int, context: int, rows: int) -> Iterator[Measure]:
    """Two exact ratios, payload over the formula and bytes in the storages over bytes declared; ragged over dense."""
    declared, held = [], {}
    for policy in POLICIES:
        cache = new_cache(policy, model, rows)
        forward(model, batch_ids(filler, batch, context, model.device), cache)
        ledger, expected = cache.ledger(), formula_bytes(model, batch, rows)
        rest = ledger.measured_bytes - ledger.payload_bytes - ledger.slack_bytes
        details = {
            "payload": ledger.payload_bytes, "slack": ledger.slack_bytes, "positions and rest": rest,
            "full cache": formula_bytes(model, batch, context),
        }  # fmt: skip
        held[policy] = (ledger.measured_bytes - ledger.slack_bytes, ledger.slack_bytes)
        name = f"{policy}, {rows} rows, context {context}, batch {batch}"
        yield Measure("payload/formula", name, ledger.payload_bytes / expected, "==", 1.0, details)
        measured = {"measured": ledger.measured_bytes, "declared": ledger.declared_bytes}
        declared.append(
            Measure("measured/declared", name, measured["measured"] / measured["declared"], "==", 1.0, measured)
        )
    yield from declared
    dense, dense_slack = held["snapkv"]
    for policy in RAGGED:
        # Slack is named apart: every region has some of its own, so that appending writes in place.
        (ragged, slack), name = held[policy], f"{policy}, {rows} rows in the mean, context {context}, batch {batch}"
        details = {"bytes": ragged, "slack": slack, "snapkv bytes": dense, "snapkv slack": dense_slack}
        yield Measure("measured bytes without slack over snapkv", name, ragged / dense, "<=", 1.02, details)


def reset_peak(device: torch.device) -> None:
    """Forget the peak of loading the model, which is higher than that of a short prefill."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        print("The peak could not be reset here; it includes the loading of the model.", file=sys.stderr)


def peak_bytes(device: torch.device) -> int:
    """The peak since `reset_peak`: of the device's allocator, or of this process's resident set."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def child_report(model: Any, filler: list[int], policy: str | None, context: int, rows: int) -> dict[str, int]:
    """What one process sees of one prefill; a process of its own, since a peak cannot be taken twice."""
    ids = batch_ids(filler, 1, context, model.device)
    forward(model, ids[:, :64], new_cache(None, model, 0))
    cache = new_cache(policy, model, rows)
    reset_peak(model.device)
    before = peak_bytes(model.device)
    forward(model, ids, cache)
    peak = peak_bytes(model.device)
    kv_peak = dynamic_cache_bytes(cache) if policy is None else cache.ledger().transient_peak_bytes
    return {"kv_peak": kv_peak, "process_peak": peak, "process_before": before}


def _run_child(arguments: list[str], policy: str) -> dict[str, int]:
    command = [sys.executable, sys.argv[0], *arguments, "--child", policy]
    # A fixed threshold gives every K/V tensor its own mapping; otherwise the heap's holes count as the cache's bytes.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    report: dict[str, int] = json.loads(finished.stdout.splitlines()[-1])
    return report


def peak_measures(arguments: list[str], policy: str, context: int, rows: int) -> Iterator[Measure]:
    """The peak of a prefill, declared by the ledger and cross-checked by the system in two processes."""
    full, small = _run_child(arguments, "full"), _run_child(arguments, policy)
    name = f"{policy}, {rows} rows, context {context}, batch 1"
    details = {"peak": small["kv_peak"], "full cache": full["kv_peak"]}
    yield Measure("peak KV bytes", name, small["kv_peak"] / full["kv_peak"], "<", PEAK_TARGET, details)
    saved = full["process_peak"] - small["process_peak"]
    expected = full["kv_peak"] - small["kv_peak"]
    seen = {"peak fell by": saved, "KV peak fell by": expected, "full": full, "policy": small}
    yield Measure("process peak", name, saved / expected, ">=", RSS_TARGET, seen)
