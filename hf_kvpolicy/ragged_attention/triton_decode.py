"""A Triton kernel for one query token over a ragged view: a program per owner and split of its rows.

Each program streams its rows in blocks with an online softmax in fp32 and serves all query heads of its owner at once;
a second kernel joins the splits. Lengths are read on the device as base lengths plus a tail, so that a decode step
sends nothing to it. Slots beyond an owner's rows are masked as they are loaded: what lies there never enters.

Importing this module imports triton. Letters: O owners, G query heads per owner, K splits, N slots, D key dimension,
V value dimension; blocks are padded to powers of two in registers only.
"""

# Kernels are no Python functions: triton takes their annotations for types of its own.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..storage import RaggedView

__all__ = ["attend_decode"]

_LOG2_E = 1.4426950408889634
# tl.dot takes no smaller side.
_LEAST_SIDE = 16
# What a block of keys takes in shared memory, several of which are in flight: fits the smallest supported devices.
_BLOCK_BYTES, _MOST_BLOCK_ROWS = 1 << 14, 64
# A split of fewer blocks costs more in joining than its program gains.
_LEAST_BLOCKS_PER_SPLIT = 4
_PROGRAMS_PER_PROCESSOR = 2


@triton.jit(do_not_specialize=["tail_rows", "rows_per_split"])
def _decode_kernel(
    query_OGD, keys_ND, values_ND, starts_O, base_lengths_O, sums_OKGV, maxima_OKG, weights_OKG,
    scale, tail_rows, rows_per_split, key_slot, key_within, value_slot, value_within,
    GROUP: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Unnormalised sum of values, maximum logit (base 2) and sum of weights of one split of one owner."""
    owner, split = tl.program_id(0), tl.program_id(1)
    start = tl.load(starts_O + owner).to(tl.int64)
    rows = tl.load(base_lengths_O + owner) + tail_rows
    begin = split * rows_per_split
    end = tl.minimum(begin + rows_per_split, rows)
    g, d, v, n = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V), tl.arange(0, BLOCK_N)
    query = tl.load(
        query_OGD + (owner * GROUP + g[:, None]) * KEY_DIM + d[None, :],
        mask=(g[:, None] < GROUP) & (d[None, :] < KEY_DIM),
        other=0.0,
    )
    maximum = tl.full([BLOCK_G], float("-inf"), tl.float32)
    weight = tl.zeros([BLOCK_G], tl.float32)
    total = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    for block in range(begin, end, BLOCK_N):
        row = block + n
        slot = start + row
        held = row < end
        keys = tl.load(
            keys_ND + slot[None, :] * key_slot + d[:, None] * key_within,
            mask=held[None, :] & (d[:, None] < KEY_DIM),
            other=0.0,
        )
        values = tl.load(
            values_ND + slot[:, None] * value_slot + v[None, :] * value_within,
            mask=held[:, None] & (v[None, :] < VALUE_DIM),
            other=0.0,
        )
        logits = tl.dot(query, keys, input_precision="ieee") * scale
        logits = tl.where(held[None, :], logits, float("-inf"))
        # A block holds at least one row, so the new maximum is finite.
        larger = tl.maximum(maximum, tl.max(logits, 1))
        faded = tl.exp2(maximum - larger)
        weights = tl.exp2(logits - larger[:, None])
        weight = weight * faded + tl.sum(weights, 1)
        total = tl.dot(weights.to(values.dtype), values, total * faded[:, None], input_precision="ieee")
        maximum = larger
    part = (owner * tl.num_programs(1) + split) * GROUP + g
    tl.store(maxima_OKG + part, maximum, mask=g < GROUP)
    tl.store(weights_OKG + part, weight, mask=g < GROUP)
    tl.store(
        sums_OKGV + part[:, None] * VALUE_DIM + v[None, :],
        total,
        mask=(g[:, None] < GROUP) & (v[None, :] < VALUE_DIM),
    )


@triton.jit
def _join_kernel(
    sums_OKGV,
    maxima_OKG,
    weights_OKG,
    output_OGV,
    GROUP: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The output of one query head from the splits of its owner; zeros where the owner has no rows."""
    owner, head = tl.program_id(0), tl.program_id(1)
    v = tl.arange(0, BLOCK_V)
    maximum = float("-inf")
    for split in range(SPLITS):
        maximum = tl.maximum(maximum, tl.load(maxima_OKG + (owner * SPLITS + split) * GROUP + head))
    maximum = tl.where(maximum == float("-inf"), 0.0, maximum)
    weight = 0.0
    total = tl.zeros([BLOCK_V], tl.float32)
    for split in range(SPLITS):
        part = (owner * SPLITS + split) * GROUP + head
        faded = tl.exp2(tl.load(maxima_OKG + part) - maximum)
        weight += tl.load(weights_OKG + part) * faded
        total += tl.load(sums_OKGV + part * VALUE_DIM + v, mask=v < VALUE_DIM, other=0.0) * faded
    output = total / tl.where(weight == 0.0, 1.0, weight)
    tl.store(output_OGV + (owner * GROUP + head) * VALUE_DIM + v, output, mask=v < VALUE_DIM)


def attend_decode(query_BQTD: Tensor, view: RaggedView, *, scaling: float, splits: int | None = None) -> Tensor:
    """Attend with one query token, [B, 1, Q, D]. `splits` per owner are chosen from the device's size when None."""
    batch, heads, tokens, key_dim = query_BQTD.shape
    assert tokens == 1
    owners, value_dim, device = len(view.starts), view.values_ND.shape[1], query_BQTD.device
    group = batch * heads // owners
    block_d, block_v = _block(key_dim), _block(value_dim)
    block_rows = _block_rows(max(block_d, block_v), query_BQTD.element_size())
    longest_blocks = max(1, -(-max(view.lengths) // block_rows))
    splits = splits or _splits(device, owners, longest_blocks)
    query_OGD = query_BQTD.reshape(owners, group, key_dim).contiguous()
    starts_O, base_lengths_O = view.on_device()
    sums_OKGV = torch.empty((owners, splits, group, value_dim), dtype=torch.float32, device=device)
    maxima_OKG = torch.empty((owners, splits, group), dtype=torch.float32, device=device)
    weights_OKG = torch.empty_like(maxima_OKG)
    output_OGV = torch.empty((owners, group, value_dim), dtype=query_BQTD.dtype, device=device)
    with torch.cuda.device_of(query_BQTD):
        _decode_kernel[(owners, splits)](
            query_OGD, view.keys_ND, view.values_ND, starts_O, base_lengths_O, sums_OKGV, maxima_OKG, weights_OKG,
            scaling * _LOG2_E, view.tail_rows, -(-longest_blocks // splits) * block_rows,
            *view.keys_ND.stride(), *view.values_ND.stride(),
            GROUP=group, KEY_DIM=key_dim, VALUE_DIM=value_dim,
            BLOCK_G=_block(group), BLOCK_D=block_d, BLOCK_V=block_v, BLOCK_N=block_rows,
        )  # fmt: skip
        _join_kernel[(owners, group)](
            sums_OKGV, maxima_OKG, weights_OKG, output_OGV,
            GROUP=group, VALUE_DIM=value_dim, SPLITS=splits, BLOCK_V=block_v,
        )  # fmt: skip
    return output_OGV.view(batch, 1, heads, value_dim)


def _block(size: int) -> int:
    return max(_LEAST_SIDE, int(triton.next_power_of_2(size)))


def _block_rows(block_dim: int, element_bytes: int) -> int:
    return max(_LEAST_SIDE, min(_MOST_BLOCK_ROWS, _BLOCK_BYTES // (block_dim * element_bytes)))


def _splits(device: torch.device, owners: int, longest_blocks: int) -> int:
    """Return how many programs share an owner: enough to fill the device, none with too little to do.

    A power of two: the number is compiled into the kernel that joins them.
    """
    wanted = min(longest_blocks // _LEAST_BLOCKS_PER_SPLIT, _PROGRAMS_PER_PROCESSOR * _processors(device) // owners)
    return 1 << max(0, wanted.bit_length() - 1)


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1
