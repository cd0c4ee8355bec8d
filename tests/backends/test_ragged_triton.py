"""The Triton kernel against the reference: interpreted without a GPU, compiled for one, and run where there is one."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_kvpolicy.ragged_attention import attend_ragged
from hf_kvpolicy.ragged_attention.reference import attend_reference

from ._ragged import ragged_query, ragged_view

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

INTERPRETED = """
import json, torch
from hf_kvpolicy.ragged_attention.reference import attend_reference
from hf_kvpolicy.ragged_attention.triton_decode import attend_decode
from _ragged import ragged_query, ragged_view

errors = {}
# bf16 is left out: the interpreter multiplies its bits as integers.
for name, dtype in (("float32", torch.float32), ("float16", torch.float16)):
    for lengths, heads, group, key_dim, value_dim, splits in (
        ((70, 1, 200), 3, 1, 64, 64, 1),
        ((70, 1, 200), 3, 3, 64, 64, 4),
        ((0, 65, 64, 0), 2, 4, 20, 12, 2),
        ((0,), 1, 3, 16, 16, 2),
        ((128, 3, 1, 90, 17, 64), 2, 17, 32, 40, 1),
    ):
        for tail_rows in (0, 1):
            if min(lengths) < tail_rows:
                continue
            view = ragged_view(lengths, heads, key_dim=key_dim, value_dim=value_dim, dtype=dtype, tail_rows=tail_rows)
            query = ragged_query(view, group, 1)
            found = attend_decode(query, view, scaling=0.125, splits=splits)
            wanted = attend_reference(query, view, None, scaling=0.125)
            assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
            case = f"{name} {lengths} {group} {key_dim} {value_dim} {splits} {tail_rows}"
            errors[case] = (found.float() - wanted.float()).abs().max().item()
print(json.dumps(errors))
"""

COMPILED = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hf_kvpolicy.ragged_attention import triton_decode as kernels

def compiled(kernel, pointers, scalars, constants):
    signature = {**pointers, **scalars, **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", 80, 32))

dtype, bytes_, dim = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
block = kernels._block(dim)
rows = dict.fromkeys(("query_OGD", "keys_ND", "values_ND"), "*" + dtype)
numbers = dict.fromkeys(("starts_O", "base_lengths_O"), "*i32")
parts = dict.fromkeys(("sums_OKGV", "maxima_OKG", "weights_OKG"), "*fp32")
scalars = dict.fromkeys(
    ("tail_rows", "rows_per_split", "key_slot", "key_within", "value_slot", "value_within"), "i32"
)
decode = compiled(
    kernels._decode_kernel, {**rows, **numbers, **parts}, {"scale": "fp32", **scalars},
    {"GROUP": 3, "KEY_DIM": dim, "VALUE_DIM": dim, "BLOCK_G": 16, "BLOCK_D": block, "BLOCK_V": block,
     "BLOCK_N": kernels._block_rows(block, bytes_)},
)
join = compiled(
    kernels._join_kernel, {**parts, "output_OGV": "*" + dtype}, {},
    {"GROUP": 3, "VALUE_DIM": dim, "SPLITS": 4, "BLOCK_V": block},
)
print(json.dumps({"shared": decode.metadata.shared, "join": len(join.asm["ptx"])}))
"""


def _run(script: str, *arguments: str, **variables: str) -> Any:
    path = os.pathsep.join(filter(None, (str(Path(__file__).parent), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "PYTHONPATH": path, **variables},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@needs_triton
def test_interpreted_kernels_equal_the_reference() -> None:
    errors = _run(INTERPRETED, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert len(errors) == 16
    for case, error in errors.items():
        assert error <= (1e-5 if case.startswith("float32") else 2e-3), case


@needs_triton
@pytest.mark.parametrize(("dtype", "element_bytes", "dim"), [("bf16", 2, 64), ("fp32", 4, 256)])
def test_kernels_compile_for_a_gpu(dtype: str, element_bytes: int, dim: int, tmp_path: Path) -> None:
    """Needs no GPU. The interpreter accepts Python that the compiler does not."""
    found = _run(COMPILED, dtype, str(element_bytes), str(dim), TRITON_CACHE_DIR=str(tmp_path))
    assert found["shared"] <= 99 * 1024, "the shared memory of a block on the smallest devices"
    assert found["join"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("lengths", "heads"), [((700, 1, 5000), 3), ((0, 64, 65, 900), 2)])
def test_on_a_gpu_kernels_equal_the_reference(dtype: torch.dtype, lengths: tuple[int, ...], heads: int) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    view = ragged_view(lengths, heads, key_dim=64, dtype=dtype)
    query = ragged_query(view, 3, 1)
    wanted = attend_reference(query, view, None, scaling=0.125)
    there = ragged_view(lengths, heads, key_dim=64, dtype=dtype, device="cuda")
    found = attend_ragged("sdpa", query.cuda(), there, None, scaling=0.125)
    torch.testing.assert_close(found.cpu(), wanted, atol=tolerance, rtol=tolerance)
