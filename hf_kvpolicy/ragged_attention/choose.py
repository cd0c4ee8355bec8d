"""Which implementation reads a ragged view, asked before anything is packed (specification 0x0ED).

Every choice reads the same rows where they lie. A backend that cannot is refused, never given a padded copy.
"""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from ..errors import BackendAdmissionError
from ..storage import RaggedView
from .flash_varlen import flash_admits

__all__ = ["admit_ragged", "ragged_backend"]

_READERS = ("eager", "flash_attention_2", "flash_attention_3", "sdpa")
_TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_TRITON_LARGEST_HEAD_DIM = 256
_TRITON_CAPABILITY = (8, 0)  # bf16 products need it


def admit_ragged(backend: str) -> None:
    """Probe that a backend of transformers may read ragged rows.

    Raises:
        BackendAdmissionError: it cannot, such as `flex_attention`, whose block masks are built for rectangles.
    """
    if backend not in _READERS:
        raise BackendAdmissionError(
            f"The backend {backend!r} cannot read rows of unequal number per head, and they are not padded for it; "
            f'those that can: {", ".join(_READERS)}. Call attach(model, backend="sdpa"), or choose a policy that keeps '
            "the same number of rows in every head."
        )


def ragged_backend(
    backend: str,
    query_BQTD: Tensor,
    view: RaggedView,
    *,
    masked: bool,
    dropout: float = 0.0,
    plain_softmax: bool = True,
) -> Literal["eager", "flash_varlen", "triton", "owners"]:
    """Return what reads the view: the backend's own kernel or ours where admitted, else SDPA owner by owner.

    Args:
        masked: whether any owner has a mask, which kernels do not take.
        plain_softmax: whether weights are the softmax of scaled products; nothing but `eager` knows others.

    Raises:
        BackendAdmissionError: see `admit_ragged`.
    """
    admit_ragged(backend)
    if backend == "eager" or not plain_softmax:
        return "eager"
    if masked or dropout or query_BQTD.device.type != "cuda":
        return "owners"
    if backend != "sdpa" and flash_admits(backend, query_BQTD, view):
        return "flash_varlen"
    return "triton" if _triton_admits(query_BQTD, view) else "owners"


def _triton_admits(query_BQTD: Tensor, view: RaggedView) -> bool:
    learns = torch.is_grad_enabled() and (query_BQTD.requires_grad or view.keys_ND.requires_grad)
    return (
        query_BQTD.shape[2] == 1
        and not learns  # the kernel has no backward
        and query_BQTD.dtype in _TRITON_DTYPES
        and max(view.keys_ND.shape[1], view.values_ND.shape[1]) <= _TRITON_LARGEST_HEAD_DIM
        and _triton_runs(query_BQTD.device)
    )


@lru_cache(maxsize=16)
def _triton_runs(device: torch.device) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= _TRITON_CAPABILITY
