"""Ragged attention through flash-attn's varlen function: a sequence per owner, which carries its group of query heads.

Admitted only where owners lie packed, one behind the other. The function finds keys at cumulative lengths, which leave
no room for slack; a variant with used lengths (`seqused_k`) may still load the slack behind them, and garbage in it
(NaN) would reach the output. Rows are never packed for its sake.

Letters: B batch rows, S stored heads, O owners (B * S), Q query heads, G query heads per owner, T queries, D head
dimension, N rows.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..storage import RaggedView

__all__ = ["attend_flash_varlen", "flash_admits", "varlen_function"]

# transformers' name of the backend -> the module that has its varlen function.
_MODULES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
_DTYPES = (torch.float16, torch.bfloat16)
_LARGEST_HEAD_DIM = 256


@lru_cache(maxsize=8)
def varlen_function(backend: str) -> Callable[..., Any] | None:
    """Return the varlen function behind a backend of transformers, or None where its package is not installed."""
    try:
        return getattr(importlib.import_module(_MODULES[backend]), "flash_attn_varlen_func", None)
    except (KeyError, ImportError):
        return None


def flash_admits(backend: str, query_BQTD: Tensor, view: RaggedView) -> bool:
    """Whether the varlen function reads these rows as they lie: on CUDA, in half precision, packed."""
    key_dim, value_dim = view.keys_ND.shape[1], view.values_ND.shape[1]
    return (
        query_BQTD.device.type == "cuda"
        and query_BQTD.dtype in _DTYPES
        and key_dim == value_dim <= _LARGEST_HEAD_DIM
        and key_dim % 8 == 0
        and _packed(view)
        and varlen_function(backend) is not None
    )


def attend_flash_varlen(backend: str, query_BQTD: Tensor, view: RaggedView, *, scaling: float, causal: bool) -> Tensor:
    """Attend with one varlen sequence per owner, [B, T, Q, D]; `causal` is aligned to the last rows of an owner."""
    function = varlen_function(backend)
    assert function is not None
    batch, heads, tokens, dim = query_BQTD.shape
    owners, first = len(view.starts), view.starts[0]
    rows = view.starts[-1] + view.lengths[-1] - first
    query_OTGD = query_BQTD.reshape(owners, -1, tokens, dim).transpose(1, 2)
    starts_O, _ = view.on_device()
    found = function(
        query_OTGD.reshape(owners * tokens, -1, dim),
        view.keys_ND.narrow(0, first, rows).unsqueeze(1),
        view.values_ND.narrow(0, first, rows).unsqueeze(1),
        cu_seqlens_q=torch.arange(0, (owners + 1) * tokens, tokens, dtype=torch.int32, device=query_BQTD.device),
        cu_seqlens_k=torch.cat([starts_O - first, starts_O.new_full((1,), rows)]),
        max_seqlen_q=tokens,
        max_seqlen_k=max(view.lengths),
        softmax_scale=scaling,
        causal=causal,
    )
    output: Tensor = found[0] if isinstance(found, tuple) else found  # some releases return the log-sum-exp as well
    output_BSTGD = output.view(batch, view.heads, tokens, heads // view.heads, -1)
    return output_BSTGD.permute(0, 2, 1, 3, 4).reshape(batch, tokens, heads, -1)


def _packed(view: RaggedView) -> bool:
    ends = [start + rows for start, rows in zip(view.starts, view.lengths, strict=True)]
    return list(view.starts[1:]) == ends[:-1]
