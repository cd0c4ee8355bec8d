"""What a memory stores decides its bytes and who reads it: the formulas of 0x00H and 0x0D."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

import hf_kvpolicy as kv
from hf_kvpolicy.contract import RESERVED_POLICIES, STATE_KINDS

KV = {"layers": 32, "kv_heads": 8, "rows": 512, "head_dim": 128}
CONFIG = LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)


@pytest.mark.parametrize(
    ("kind", "shape", "scalars"),
    [
        ("raw_kv", KV, 32 * 512 * 2 * 8 * 128),
        ("merged_kv", {**KV, "rows": 256}, 32 * 256 * 2 * 8 * 128),
        ("hidden_memory", {"layers": 16, "slots": 640, "d_model": 410}, 16 * 640 * 410),
        (
            "dual_activation",
            {"layers": 24, "local_slots": 768, "compressed_slots": 1152, "d_model": 1024},
            24 * 1920 * 1024,
        ),
        ("segment_summaries", {"segment": 4, "summary_tokens": 50, "d_model": 4096}, 3 * 50 * 4096),
    ],
)
def test_bytes_follow_the_formula_of_the_kind(kind: str, shape: dict[str, int], scalars: int) -> None:
    assert kv.describe_state(kind, shape=shape, dtype="bfloat16").bytes == 2 * scalars
    assert kv.describe_state(kind, shape=shape, dtype=torch.float32, batch_rows=3).bytes == 3 * 4 * scalars


def test_equal_slots_are_not_equal_bytes() -> None:
    """Under grouped queries 2 H_kv d_h is less than d_model; with as many KV heads as query heads it is twice that."""
    hidden = kv.describe_state("hidden_memory", shape={"layers": 32, "slots": 512, "d_model": 4096}, dtype="float16")
    grouped = kv.describe_state("raw_kv", shape=KV, dtype="float16")
    every_head = kv.describe_state("raw_kv", shape={**KV, "kv_heads": 32}, dtype="float16")
    assert grouped.bytes * 2 == hidden.bytes
    assert every_head.bytes == hidden.bytes * 2


def test_summaries_grow_by_kappa_per_segment_and_start_with_nothing() -> None:
    """50 vectors of one segment are not 50 vectors of a document."""
    shape = {"summary_tokens": 50, "d_model": 4096}
    sizes = [kv.describe_state("segment_summaries", shape={"segment": i, **shape}, dtype="float16") for i in (1, 2, 3)]
    assert [size.bytes for size in sizes] == [0, 50 * 4096 * 2, 100 * 4096 * 2]


def test_only_kv_rows_are_read_by_an_ordinary_checkpoint() -> None:
    sizes: dict[str, Any] = {
        "raw_kv": KV,
        "merged_kv": KV,
        "hidden_memory": {"layers": 1, "slots": 1, "d_model": 1},
        "dual_activation": {"layers": 1, "local_slots": 1, "compressed_slots": 1, "d_model": 1},
        "segment_summaries": {"segment": 1, "summary_tokens": 1, "d_model": 1},
    }
    assert tuple(sizes) == STATE_KINDS
    found = {kind: kv.describe_state(kind, shape=shape, dtype="float16") for kind, shape in sizes.items()}
    assert [kind for kind, state in found.items() if state.checkpoint_needed is None] == ["raw_kv", "merged_kv"]
    assert len({state.stored_object for state in found.values()}) == len(found)
    assert len({state.consumer for state in found.values()}) == len(found)


@pytest.mark.parametrize(
    ("kind", "shape", "dtype", "message"),
    [
        ("raw_kvs", KV, "float16", "Did you mean 'raw_kv'"),
        ("raw_kv", {**KV, "slots": 3}, "float16", "no axis 'slots'"),
        ("raw_kv", {"layers": 3}, "float16", "needs its axis 'kv_heads'"),
        ("raw_kv", {**KV, "rows": -1}, "float16", "rows must be at least 0"),
        ("raw_kv", KV, "int4", "dtype must be one of"),
        ("raw_kv", None, "float16", "a mapping that names its axes"),
        ("raw_kv", [32, 8, 512, 128], "float16", "a mapping that names its axes"),
        ("raw_kv", {**KV, 1: 3}, "float16", "no axis 1"),
        ("segment_summaries", {"segment": 0, "summary_tokens": 1, "d_model": 1}, "float16", "at least 1"),
    ],
)
def test_a_size_that_says_too_little_is_refused(kind: str, shape: Any, dtype: str, message: str) -> None:
    with pytest.raises(kv.ConfigError, match=message):
        kv.describe_state(kind, shape=shape, dtype=dtype)


@pytest.mark.parametrize(
    ("name", "checkpoint"),
    [
        ("transformer_xl", "Transformer-XL"),
        ("compressive_transformer", "Compressive Transformer"),
        ("autocompressor", "AutoCompressor"),
    ],
)
def test_a_reserved_name_says_which_checkpoint_it_would_need(name: str, checkpoint: str) -> None:
    assert name in RESERVED_POLICIES
    assert name not in kv.available_policies()
    for ask in (lambda: kv.make_cache(name, CONFIG), lambda: kv.load_policy({"policy": name})):
        with pytest.raises(kv.CheckpointAdmissionError, match=f"read only by an? {checkpoint} checkpoint"):
            ask()
    with pytest.raises(kv.ConfigError, match="reserved"):
        kv.register_policy(name)
