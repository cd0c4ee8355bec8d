"""Rows merged over layer pairs: bytes of a whole context, and of what a policy keeps, against the formula."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

import hf_kvpolicy as kv

from .models import forward
from .report import Measure

# Lengths of both layers' rows, of keys and of values, in fp32; and the index of a row kept as it was.
LENGTH_BYTES, INDEX_BYTES = 4 * 4, 4


def pair_formula_bytes(rows: int, exact: int, head_dim: int, scalar_bytes: int) -> int:
    """Bytes of a pair and KV head: shared keys and values, lengths, and what is kept apart in keys and in values."""
    shared_bytes = 2 * rows * head_dim * scalar_bytes + rows * LENGTH_BYTES
    return shared_bytes + exact * (2 * head_dim * scalar_bytes + INDEX_BYTES)


def merged_byte_measures(model: Any, ids: torch.Tensor, rows: int) -> Iterator[Measure]:
    """Two exact ratios each: bytes of pairs over the formula, and bytes in the storages over bytes declared."""
    # The upper half, as is the default; of a model of two layers both.
    rule = {"start_layer": model.config.num_hidden_layers // 2 if model.config.num_hidden_layers > 3 else 0}
    context = f"context {ids.shape[1]}, batch {ids.shape[0]}"
    cases = {
        f"minicache, {context}": kv.make_cache("minicache", model, **rule),
        f"snapkv, {rows} rows, unit pair, {context}": kv.make_cache(
            "snapkv", model, budget=rows, unit="pair", merge_layers=rule
        ),
    }
    for name, cache in cases.items():
        forward(model, ids, cache)
        ledger, tensor = cache.ledger(), cache.manifest.tensor_contract
        scalar_bytes, stores = model.dtype.itemsize, cache.receipt.replaced_rows
        pairs = [store for store in stores if len(store.layers) == 2]
        expected = [
            pair_formula_bytes(len(spans), len(keys) + len(values), tensor.head_dim_k, scalar_bytes)
            for pair in pairs
            for spans, keys, values in zip(pair.spans, pair.exact_keys, pair.exact_values, strict=True)
        ]
        alone_rows = sum(len(spans) for store in stores if len(store.layers) == 1 for spans in store.spans)
        held_bytes = ledger.payload_bytes - alone_rows * tensor.row_bytes
        owners = len(expected)
        rows_of_owner = sum(len(spans) for pair in pairs for spans in pair.spans) / owners
        exceptions = sum(len(own) for pair in pairs for own in (*pair.exact_keys, *pair.exact_values))
        details = {
            "rows of a pair and KV head": rows_of_owner, "bytes": round(held_bytes / owners),
            "unmerged": round(2 * rows_of_owner * tensor.row_bytes), "slack": ledger.slack_bytes,
            "exceptions a row": exceptions / owners / rows_of_owner,
        }  # fmt: skip
        yield Measure("merged payload/formula", name, held_bytes / sum(expected), "==", 1.0, details)
        measured = {"measured": ledger.measured_bytes, "declared": ledger.declared_bytes}
        ratio = ledger.measured_bytes / ledger.declared_bytes
        yield Measure("merged measured/declared", name, ratio, "==", 1.0, measured)
