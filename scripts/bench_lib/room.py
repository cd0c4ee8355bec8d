"""What a device can hold and move: bytes needed, computed before anything is allocated, peaks, and copy bandwidth."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from script_lib.loading import synchronize

from .memory import dynamic_cache_bytes, formula_bytes, peak_bytes, reset_peak

# Kept free: the allocator's fragments, the libraries' workspaces.
FREE_SHARE = 0.05
COPY_BYTES = {"cuda": 2 << 30, "cpu": 64 << 20}
COPY_ROUNDS = 10


def weight_bytes(model: Any) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def cache_bytes(cache: Any) -> int:
    """Bytes of a cache's storages, transformers' own or a policy's."""
    return int(cache.ledger().measured_bytes) if hasattr(cache, "ledger") else dynamic_cache_bytes(cache)


def prefill_need_bytes(model: Any, tokens: int, *, keeps_all: bool) -> int:
    """Bytes a prefill of one prompt adds: one layer's activations and the K/V, of one layer where a policy drops rows.

    An estimate from above: the MLP's intermediates and eight tensors of the hidden size at once.
    """
    config, kv_bytes = model.config, formula_bytes(model, 1, tokens)
    activations = tokens * (4 * config.intermediate_size + 8 * config.hidden_size) * model.dtype.itemsize
    return activations + (kv_bytes if keeps_all else 2 * kv_bytes // config.num_hidden_layers)


def decode_need_bytes(model: Any, batch: int, rows: int) -> int:
    """Bytes of a cache of `rows` rows, and of two layers more: one is concatenated or repeated at a time."""
    kv_bytes = formula_bytes(model, batch, rows)
    return kv_bytes + 2 * kv_bytes // model.config.num_hidden_layers


def device_bytes(device: torch.device) -> int | None:
    """Memory of the device; None for a CPU, whose memory is not ours alone."""
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else None


def missing(memory_bytes: int | None, held_bytes: int, need_bytes: int) -> str | None:
    """Why what is needed does not fit beside what is held, or None."""
    if memory_bytes is None or held_bytes + need_bytes <= memory_bytes * (1 - FREE_SHARE):
        return None
    gib = [value / 2**30 for value in (need_bytes, held_bytes, memory_bytes * (1 - FREE_SHARE))]
    return "does not fit: needs {:.1f} GiB beside {:.1f} GiB of weights and caches, usable are {:.1f} GiB".format(*gib)


def rise_bytes(device: torch.device, work: Callable[[], object]) -> int | None:
    """The most that `work` held beyond what was there before; None on a CPU, whose allocator does not tell."""
    if device.type != "cuda":
        work()
        return None
    reset_peak(device)
    before = torch.cuda.memory_allocated(device)
    work()
    synchronize(device)
    return peak_bytes(device) - before


def copy_bytes_per_s(device: torch.device) -> float:
    """Bandwidth of a copy from the device's memory to itself; bytes read and bytes written both count."""
    size = COPY_BYTES[device.type]
    source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    seconds = []
    for _ in range(COPY_ROUNDS + 1):
        synchronize(device)
        begin = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return 2 * size / statistics.median(seconds[1:])
