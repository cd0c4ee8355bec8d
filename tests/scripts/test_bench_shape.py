"""The bench of a model's shape: every cell is measured or says why not, and its bytes are those of the formulas."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench
import pytest
import torch
from bench_lib.device import POLICIES, DeviceBench
from bench_lib.memory import formula_bytes
from bench_lib.report import Measure
from bench_lib.room import decode_need_bytes, missing
from bench_lib.shapes import SHAPES, Shape, random_model
from transformers import LlamaConfig

SMALL = Shape(
    name="small",
    dimensions={
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    dtype="float32",
    contexts=(96,),
    budgets=(40,),
    batches=(1, 2),
    rounds=1,
)  # fmt: skip
ROW_BYTES = 2 * 2 * 2 * 8 * 4  # layers x KV heads x (K and V) x head_dim x fp32
CACHES = ["DynamicCache", "snapkv, 40 rows", "adakv, 40 rows", "DynamicCache, 40 rows"]


def run(
    shape: Shape = SMALL, *, device: str = "cpu", memory_bytes: int | None = None, time_limit_s: float = 60
) -> list[Measure]:
    measuring = DeviceBench(
        shape, random_model(shape, device, shape.dtype), rounds=shape.rounds, memory_bytes=memory_bytes,
        time_limit_s=time_limit_s, note=lambda text: None,
    )  # fmt: skip
    with torch.inference_mode():
        return list(measuring.measures())


def test_the_command_measures_every_cell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "run.json"
    monkeypatch.setattr(bench, "SHAPES", {"small": SMALL})
    monkeypatch.setattr(
        "sys.argv", ["bench", "--shape", "small", "--device", "cpu", "--threads", "1", "--out", str(out)]
    )
    assert bench.main() == 0
    written = json.loads(out.read_text(encoding="utf-8"))
    assert (written["environment"]["model"], written["environment"]["dtype"]) == ("small", "float32")
    values: dict[str, list[Any]] = {}
    for row in written["measures"]:
        assert row["value"] > 0
        values.setdefault(row["group"], []).append(row["name"])
    assert values["prefill s"] == [f"{name}, context 96, batch 1" for name in CACHES[:3]]
    assert values["decode tokens/s"] == [f"{name}, context 96, batch {batch}" for batch in (1, 2) for name in CACHES]


def test_bytes_moved_follow_from_the_rows() -> None:
    measures = {measure.name: measure for measure in run()}
    copy_bytes_per_s = measures["read + written"].value * 1e9
    for batch in (1, 2):
        where = f"context 96, batch {batch}"
        for name, rows, passes in (("DynamicCache", 96, 3), ("snapkv, 40 rows", 40, 1), ("adakv, 40 rows", 40, 1)):
            measure = measures[f"{name}, {where}"]
            details = measure.details
            assert details["moved"] == batch * rows * passes * ROW_BYTES
            steps_per_s = measure.value / batch
            assert details["moved/copy"] == pytest.approx(details["moved"] * steps_per_s / copy_bytes_per_s)
        for policy in POLICIES:
            assert {"x full", "x equal rows"} <= measures[f"{policy}, 40 rows, {where}"].details.keys()
    assert measures["snapkv, 40 rows, context 96, batch 2"].details["rows a head"] == "40-40"


def test_what_does_not_fit_is_reported_and_pushes_nothing_out() -> None:
    shape = replace(SMALL, contexts=(192,), batches=(1, 32))
    # As much as the full cache needs while it decodes, so that no room is left for the weights.
    need_bytes = 32 * 192 * ROW_BYTES * 2
    measures = run(shape, memory_bytes=need_bytes)
    lost = {measure.name: measure.details for measure in measures if measure.value is None}
    assert list(lost) == ["DynamicCache, context 192, batch 32"]
    assert "does not fit" in lost["DynamicCache, context 192, batch 32"]["reason"]
    snapkv = next(m for m in measures if m.name == "snapkv, 40 rows, context 192, batch 32")
    assert "x full" not in snapkv.details
    assert "x equal rows" in snapkv.details


def test_no_time_is_a_reason_too() -> None:
    measures = run(time_limit_s=0)
    assert all("no time" in m.details["reason"] for m in measures if m.group != "device copy GB/s")
    assert len(measures) == 1 + 3 + 2 * len(CACHES)


@pytest.mark.gpu
def test_a_gpu_also_tells_peaks() -> None:
    shape = replace(SMALL, dimensions={**SMALL.dimensions, "head_dim": 64}, dtype="bfloat16")
    copy, *measures = run(shape, device="cuda")
    assert len(measures) == 3 + 2 * len(CACHES)
    for measure in measures:
        held_bytes = copy.details["weights"] + measure.details.get("cache", 0)
        assert held_bytes < measure.details["peak"] < copy.details["memory"]


def test_llama_8b_is_planned_by_its_formulas() -> None:
    shape, gib = SHAPES["llama-8b"], 2**30
    assert sum(p.numel() for p in random_model(shape, "meta", shape.dtype).parameters()) == 8_030_261_248
    model = SimpleNamespace(config=LlamaConfig(**shape.dimensions), dtype=torch.bfloat16)
    assert formula_bytes(model, batch=1, rows=1) == 128 * 2**10
    memory_bytes, weights_bytes = 139 * gib, 15 * gib
    assert missing(memory_bytes, weights_bytes, decode_need_bytes(model, 8, 65536)) is None
    assert missing(memory_bytes, weights_bytes, decode_need_bytes(model, 8, 131072)) is not None
    assert missing(None, weights_bytes, decode_need_bytes(model, 8, 131072)) is None


@pytest.mark.parametrize(
    ("change", "named"),
    [({"batches": (2, 4)}, "batches"), ({"batches": (1, 4, 6)}, "batches"), ({"budgets": (96,)}, "budgets")],
)
def test_cells_that_cannot_be_measured_are_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        replace(SMALL, **change)
