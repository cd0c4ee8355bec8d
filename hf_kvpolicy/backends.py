"""Which backend executes a view, and how a dense view is executed without expanding KV heads.

Letters: B batch rows, Q query heads, S stored heads, G query heads per stored head, T queries, N rows, D head
dimension, M mask heads (S or 1).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .compat import attention_function, backend_is_available
from .errors import BackendAdmissionError, UnsupportedModelError
from .weighting import Weighting

__all__ = [
    "BACKENDS",
    "MASK_BLOCK_ELEMENTS",
    "admit_backend",
    "attend_view",
    "backend_of",
    "computes_like_blocks",
    "grouped_attention",
    "refuse_unhandled",
    "registered_name",
    "run_stock",
    "stock_attention",
    "weighted_attention",
]

# Our registered name -> transformers' own name. No name may contain "flash": transformers would look for a kernel.
BACKENDS = {
    "kvpolicy": "sdpa",
    "kvpolicy_eager": "eager",
    "kvpolicy_fa2": "flash_attention_2",
    "kvpolicy_fa3": "flash_attention_3",
    "kvpolicy_flex": "flex_attention",
}

# Features of attention that change what a row contributes; families that use them are not handled yet.
_UNHANDLED = ("position_bias",)
# What attention must be told beyond scale and dropout where a family has it (`weighting.py`).
_OF_WEIGHTING = ("softcap", "s_aux")

# Mask elements materialised at once when many queries attend over a compressed cache.
MASK_BLOCK_ELEMENTS = 1 << 23


def registered_name(backend: str) -> str:
    """Return our name for a backend of transformers.

    Raises:
        BackendAdmissionError: the backend is not one we can wrap.
    """
    for ours, theirs in BACKENDS.items():
        if backend in (ours, theirs):
            return ours
    allowed = ", ".join(sorted(BACKENDS.values()))
    raise BackendAdmissionError(
        f"The attention implementation {backend!r} cannot be wrapped; the model must use one of: {allowed}. "
        'Call attach(model, backend="sdpa"), or load the model with one of these.'
    )


def admit_backend(backend: str) -> None:
    """Probe that a backend of transformers can run here.

    Raises:
        BackendAdmissionError: its package is not installed, or there is no device for it.
    """
    if not backend_is_available(backend):
        raise BackendAdmissionError(
            f"The backend {backend!r} cannot run here: its package is missing, or there is no GPU it supports. "
            'Install it, or call attach(model, backend="sdpa").'
        )


def backend_of(implementation: str) -> str | None:
    """Return transformers' name behind one of our registered names, or None for a name that is not ours."""
    return BACKENDS.get(implementation)


def stock_attention(backend: str, module: torch.nn.Module) -> Callable[..., Any]:
    """Return transformers' own attention function; `eager` lives in the file of the model's family.

    Raises:
        UnsupportedModelError: the family has no eager function of its own.
    """
    found = attention_function(backend) if backend != "eager" else None
    if found is None:
        found = _eager_function(module)
    if found is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} has no {backend} attention function of its own; attach with backend='sdpa'."
        )
    return found


def _eager_function(module: torch.nn.Module) -> Callable[..., Any] | None:
    return getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)


def run_stock(
    backend: str,
    module: torch.nn.Module,
    query_BQTD: Tensor,
    keys_BHND: Tensor,
    values_BHND: Tensor,
    mask: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Run transformers' own attention function exactly as it would run without us."""
    attention = stock_attention(backend, module)
    # The flash functions choose their kernel by the implementation's name in the config, which is ours now.
    seen = _ModuleUnder(module, backend) if backend.startswith("flash") else module
    output: tuple[Tensor, Tensor | None] = attention(seen, query_BQTD, keys_BHND, values_BHND, mask, **kwargs)
    return output


class _Under:
    """Reads through to an object."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class _ConfigUnder(_Under):
    """A config that names transformers' implementation instead of ours."""

    def __init__(self, target: Any, backend: str) -> None:
        super().__init__(target)
        self._attn_implementation = backend


class _ModuleUnder(_Under):
    """An attention module whose config names transformers' implementation instead of ours."""

    def __init__(self, module: torch.nn.Module, backend: str) -> None:
        super().__init__(module)
        self.config = _ConfigUnder(module.config, backend)


def computes_like_blocks(backend: str, tensors: tuple[Tensor, ...], arguments: dict[str, Any]) -> bool:
    """Whether a softmax over blocks of queries does what the backend would do, up to the order of sums.

    That is SDPA on a CPU in fp32, without dropout and without a graph. Elsewhere the backend's own kernel is faster, or
    rounds in its own way.
    """
    if backend != "sdpa" or arguments.get("dropout"):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        return False
    return all(tensor.device.type == "cpu" and tensor.dtype == torch.float32 for tensor in tensors)


def refuse_unhandled(arguments: dict[str, Any], backend: str | None = None) -> None:
    """Refuse features of attention that change what a row contributes: neither views nor evidence know them.

    Raises:
        BackendAdmissionError: the model passes one of them, or one that its backend would ignore.
    """
    if backend == "sdpa" and any(arguments.get(name) is not None for name in _OF_WEIGHTING):
        raise BackendAdmissionError(
            "The model caps its logits (softcap) or has attention sinks (s_aux), which transformers' sdpa function "
            'does not compute. Call attach(model, backend="eager"), or use a flash or flex backend that does.'
        )
    for name in _UNHANDLED:
        if arguments.get(name) is not None:
            raise BackendAdmissionError(
                f"The model passes {name!r} to attention, which is not handled by policy caches yet. "
                "Run this model with transformers' own cache."
            )


def attend_view(
    backend: str,
    module: torch.nn.Module,
    query_BQTD: Tensor,
    keys_BSND: Tensor,
    values_BSND: Tensor,
    mask_BMTN: Tensor | None,
    arguments: dict[str, Any],
) -> Tensor:
    """Attend over a dense view of unequal history; returns [B, T, Q, D]. `arguments` are the model's own for attention.

    A mask is bool [B, M, T, N], or a bias [B, Q, T, N] in fp32, -inf where a query does not see a row.
    `eager` runs the family's own function, flash runs where the view needs no mask, all else (and flash with a mask) is
    exact grouped SDPA over the same rows: nothing is padded or densified.
    """
    scaling, dropout = arguments["scaling"], arguments.get("dropout", 0.0)
    told = {name: arguments[name] for name in _OF_WEIGHTING if arguments.get(name) is not None}
    if backend == "sdpa":
        return grouped_attention(query_BQTD, keys_BSND, values_BSND, mask_BMTN, scaling=scaling, dropout=dropout)
    if backend == "eager":
        return _eager(module, query_BQTD, keys_BSND, values_BSND, mask_BMTN, scaling, dropout, told)
    if backend.startswith("flash") and mask_BMTN is None and keys_BSND.shape[1] * _group(module) == query_BQTD.shape[1]:
        unmasked = {"scaling": scaling, "dropout": dropout, **told}
        return run_stock(backend, module, query_BQTD, keys_BSND, values_BSND, None, **unmasked)[0]
    if told:
        return weighted_attention(query_BQTD, keys_BSND, values_BSND, mask_BMTN, scaling, Weighting.of(told), dropout)
    return grouped_attention(query_BQTD, keys_BSND, values_BSND, mask_BMTN, scaling=scaling, dropout=dropout)


def grouped_attention(
    query_BQTD: Tensor,
    keys_BSND: Tensor,
    values_BSND: Tensor,
    mask_BMTN: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
) -> Tensor:
    """Grouped-query SDPA with the queries of a group folded into rows; KV heads are never repeated. [B, T, Q, D]."""
    batch, query_heads, tokens, dim = query_BQTD.shape
    stored, rows = keys_BSND.shape[1], keys_BSND.shape[2]
    group = query_heads // stored
    if tokens == 1:
        one = functional.scaled_dot_product_attention(
            query_BQTD.reshape(batch, stored, group, dim),
            keys_BSND,
            values_BSND,
            attn_mask=_folded_mask(mask_BMTN, slice(0, 1), stored, query_BQTD),
            dropout_p=dropout,
            scale=scaling,
        )
        return one.reshape(batch, 1, query_heads, -1)
    block = tokens if mask_BMTN is None else max(1, MASK_BLOCK_ELEMENTS // max(1, group * rows * mask_BMTN.shape[1]))
    parts = []
    for start in range(0, tokens, block):
        query = query_BQTD[:, :, start : start + block]
        width = query.shape[2]
        mask = _folded_mask(mask_BMTN, slice(start, start + width), stored, query)
        if mask is not None and 1 < mask.shape[2] == width:
            mask = mask.repeat(1, 1, group, 1)
        folded = query.reshape(batch, stored, group * width, dim)
        out = functional.scaled_dot_product_attention(
            folded, keys_BSND, values_BSND, attn_mask=mask, dropout_p=dropout, scale=scaling
        )
        parts.append(out.view(batch, query_heads, width, -1))
    output = parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)
    return output.transpose(1, 2).contiguous()


def _folded_mask(mask_BMTN: Tensor | None, part: slice, stored: int, like: Tensor) -> Tensor | None:
    """Return the mask of some queries; a bias has heads folded as their queries are, in the dtype SDPA wants."""
    if mask_BMTN is None:
        return None
    mask = mask_BMTN[:, :, part] if mask_BMTN.shape[2] > 1 else mask_BMTN
    if mask.dtype is torch.bool:
        return mask
    batch, heads, queries, rows = mask.shape
    return mask.to(like).reshape(batch, stored, heads // stored * queries, rows)


def weighted_attention(
    query_BQTD: Tensor,
    keys_BSND: Tensor,
    values_BSND: Tensor,
    mask_BMTN: Tensor | None,
    scaling: float,
    weighting: Weighting,
    dropout: float = 0.0,
) -> Tensor:
    """Grouped-query attention written out, for weights that SDPA does not compute; softmax in fp32. [B, T, Q, D]."""
    batch, query_heads, tokens, dim = query_BQTD.shape
    stored = keys_BSND.shape[1]
    query_BSGTD = query_BQTD.reshape(batch, stored, query_heads // stored, tokens, dim)
    wide = torch.promote_types(query_BQTD.dtype, torch.float32)
    logits = torch.matmul(query_BSGTD.to(wide) * scaling, keys_BSND.to(wide).unsqueeze(2).transpose(3, 4))
    logits = weighting.cap_(logits)
    if mask_BMTN is not None:
        logits = logits.masked_fill(~mask_BMTN.unsqueeze(2), torch.finfo(wide).min)
    weights = functional.dropout(weighting.weights(logits), dropout, training=dropout > 0).to(values_BSND.dtype)
    output = torch.matmul(weights, values_BSND.unsqueeze(2)).reshape(batch, query_heads, tokens, -1)
    return output.transpose(1, 2).contiguous()


def _group(module: torch.nn.Module) -> int:
    return int(getattr(module, "num_key_value_groups", 1))


def _eager(
    module: torch.nn.Module,
    query_BQTD: Tensor,
    keys_BSND: Tensor,
    values_BSND: Tensor,
    mask_BMTN: Tensor | None,
    scaling: float,
    dropout: float,
    told: dict[str, Any],
) -> Tensor:
    group, has_own = query_BQTD.shape[1] // keys_BSND.shape[1], _eager_function(module) is not None
    # Rows may be owned by query heads, which the family's function does not know.
    fits = has_own and group == _group(module)
    if told and not fits:
        return weighted_attention(query_BQTD, keys_BSND, values_BSND, mask_BMTN, scaling, Weighting.of(told), dropout)
    if not has_own:
        return _plainly(query_BQTD, keys_BSND, values_BSND, mask_BMTN, scaling, dropout)
    if not fits:
        return grouped_attention(query_BQTD, keys_BSND, values_BSND, mask_BMTN, scaling=scaling, dropout=dropout)
    bias = None
    if mask_BMTN is not None:
        floor = torch.finfo(query_BQTD.dtype).min
        bias = torch.zeros(mask_BMTN.shape, dtype=query_BQTD.dtype, device=query_BQTD.device)
        bias = bias.masked_fill_(~mask_BMTN, floor)
        bias = bias if bias.shape[1] == 1 else bias.repeat_interleave(group, dim=1)
    kwargs = {"scaling": scaling, "dropout": dropout, **told}
    return run_stock("eager", module, query_BQTD, keys_BSND, values_BSND, bias, **kwargs)[0]


def _plainly(
    query_BQTD: Tensor,
    keys_BSND: Tensor,
    values_BSND: Tensor,
    mask_BMTN: Tensor | None,
    scaling: float,
    dropout: float,
) -> Tensor:
    """Attend as families without an eager function of their own do in their modules, softmax in fp32. [B, T, Q, D]."""
    batch, heads, tokens, dim = query_BQTD.shape
    stored, rows = keys_BSND.shape[1], keys_BSND.shape[2]
    group = heads // stored
    folded = query_BQTD.reshape(batch, stored, group * tokens, dim)
    logits = (torch.matmul(folded, keys_BSND.transpose(2, 3)) * scaling).view(batch, stored, group, tokens, rows)
    wide = torch.promote_types(logits.dtype, torch.float32)
    if mask_BMTN is not None and mask_BMTN.dtype is torch.bool:
        logits = logits.masked_fill(~mask_BMTN.unsqueeze(2), torch.finfo(logits.dtype).min)
    elif mask_BMTN is not None:
        bias_BSGTN = mask_BMTN.view(-1, stored, group, *mask_BMTN.shape[2:]).to(logits.device)
        # The smallest number instead of -inf: a pad that sees nothing has a finite output.
        logits = (logits + bias_BSGTN).clamp_(min=torch.finfo(logits.dtype).min)
    weights = functional.dropout(logits.softmax(-1, dtype=wide).to(values_BSND.dtype), dropout, training=dropout > 0)
    output = torch.matmul(weights.view(batch, stored, group * tokens, rows), values_BSND)
    return output.view(batch, heads, tokens, -1).transpose(1, 2).contiguous()
