"""Checking a model of an unknown family: does its attention do what a policy cache relies on?

A few tokens run through the loaded model twice: under its own eager function, which returns weights, and in two pieces
with a cache, under a function that notes what every layer hands to attention. From that, weights are computed as
policies compute them: scaled products of what `update` returned, capped, masked by the rule evaluated on columns,
softmax with sinks. Where they differ from eager's, or the two calls are not tied as ours need them, the finding says
so.

Letters: B batch rows, H KV heads, Q query heads, T queries, N rows, D head dimension.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .backends import backend_of, registered_name, run_stock
from .compat import NotedCache, cache_argument, leaving_no_hooks, register_attention, set_implementation
from .errors import BackendAdmissionError, UnsupportedModelError
from .geometry import CacheGeometry
from .masks import MaskRecord
from .weighting import Weighting
from .weights import computing_device

__all__ = ["PROBE_TOKENS", "bringing", "probe_finding", "refuse_unchecked"]

PROBE_TOKENS = 16
_FIRST_TOKENS = 10  # fed before the others, so that cached keys are read again
_NAME = "kvpolicy_probe"
# What a forward of text may bring as tensors.
_TEXT = frozenset(
    {
        "attention_mask",
        "cache_position",
        "input_ids",
        "inputs_embeds",
        "labels",
        "logits_to_keep",
        "num_items_in_batch",
        "position_ids",
        "shift_labels",
    }
)
# Largest difference of a weight: softmax in the model's dtype, and its products.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-4}
_COARSE_TOLERANCE = 3e-2


@dataclass(slots=True, eq=False)
class _Run:
    """What was noted so far."""

    backend: str
    geometry: CacheGeometry
    cache: NotedCache
    # Of the piece in hand.
    fed: int = 0
    layers: int = 0
    # The first thing that is not as a policy cache needs it.
    finding: str | None = None
    weights: dict[int, list[Tensor]] = field(default_factory=dict)


_RUN: ContextVar[_Run | None] = ContextVar("hf_kvpolicy_probe", default=None)


def bringing(arguments: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of a call's arguments that hold tensors."""
    return frozenset(name for name, value in arguments.items() if _holds_tensor(value))


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(_holds_tensor(part) for part in parts)


def refuse_unchecked(names: Iterable[str]) -> None:
    """Refuse a forward of a model that was checked on text alone, which brings something else too.

    Raises:
        UnsupportedModelError: one of the arguments that hold tensors is none of a text's.
    """
    other = sorted(set(names) - _TEXT)
    if other:
        raise UnsupportedModelError(
            f"This forward brings {', '.join(other)}, but this model's family has no patch, and it was checked on text "
            "alone: nothing shows where what these hold (images, sound, kinds of tokens) stands among rows, and which "
            "rows see it. Feed text alone, use transformers' own cache, or add a patch (CONTRIBUTING.md). "
            "KVPOLICY_PROBE=0, set before the model is first attached, serves it unchecked, at your own risk."
        )


@torch.no_grad()
def probe_finding(model: Any, geometry: CacheGeometry) -> str | None:
    """Return what keeps a model from being served, as a clause; None where nothing was found.

    The model is left as it was: its implementation's name is set back, and nothing is kept on it.
    """
    if model.training:
        return "is in training mode, where dropout hides what attention does: call model.eval()"
    if getattr(model.config, "vocab_size", None) is None:
        return "has no vocabulary in its config, so that it is no language model"
    before = str(model.config._attn_implementation)
    ids = (torch.arange(PROBE_TOKENS, device=computing_device(model)) * 7 + 3)[None] % int(model.config.vocab_size)
    try:
        with leaving_no_hooks(model), _named(model, "eager"):
            wanted = model(ids, use_cache=False, output_attentions=True).attentions
        found = _noted(model, geometry, before, ids)
    except (UnsupportedModelError, BackendAdmissionError) as error:
        return f"does not fit: {error}"
    except Exception as error:  # an unknown model may fail in any way; that is the finding
        return f"failed with {type(error).__name__}: {error}"
    if isinstance(found, str):
        return found
    return _difference(wanted, found, geometry, model.dtype)


def _noted(model: Any, geometry: CacheGeometry, before: str, ids: Tensor) -> dict[int, list[Tensor]] | str:
    backend = backend_of(registered_name(before))
    assert backend is not None, "a registered name has a backend behind it"
    run = _Run(backend=backend, geometry=geometry, cache=NotedCache(config=model.config))
    register_attention(_NAME, _attend, _mask)
    token = _RUN.set(run)
    try:
        with _named(model, _NAME):
            for piece in (ids[:, :_FIRST_TOKENS], ids[:, _FIRST_TOKENS:]):
                run.layers = 0
                run.fed += piece.shape[1]
                model(piece, **{cache_argument(): run.cache}, use_cache=True)
                if run.finding is None and run.layers != geometry.total_layers:
                    run.finding = (
                        f"ran {run.layers} of {geometry.total_layers} layers through transformers' attention interface"
                    )
                if run.finding is not None:
                    return run.finding
    finally:
        _RUN.reset(token)
    return run.weights


def _attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **arguments: Any
) -> tuple[Tensor, Tensor | None]:
    run = _RUN.get()
    assert run is not None, "only a probe uses this name"
    mask = attention_mask
    stock = mask.stock_on(query.device) if isinstance(mask, MaskRecord) else mask
    output = run_stock(run.backend, module, query, key, value, stock, **arguments)[0]
    if run.finding is None:
        run.finding = _fault(run, module, query, key, value, mask, arguments)
    if run.finding is None:
        weights = _weights(run, query, key, mask, arguments)
        group = query.shape[1] // key.shape[1]
        attended = weights @ value.float().repeat_interleave(group, dim=1)
        run.weights.setdefault(run.layers, []).append(weights)
        if not torch.allclose(attended.transpose(1, 2), output.float(), atol=_tolerance(query.dtype) * _scale(value)):
            run.finding = f"attends in layer {run.layers} to something else than weights times values"
    run.layers += 1
    return output, None


def _fault(
    run: _Run, module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, arguments: Any
) -> str | None:
    """Return what in one layer's call a policy cache could not work with."""
    layer, geometry = run.layers, run.geometry
    if getattr(module, "layer_idx", None) != layer:
        return f"calls attention for layer {getattr(module, 'layer_idx', None)} where layer {layer} was due"
    if run.cache.last is None or key is not run.cache.last[0] or value is not run.cache.last[1]:
        return f"attends in layer {layer} with keys that are not the ones its cache returned just before"
    shape = (query.shape[0], geometry.num_kv_heads, key.shape[2], geometry.key_dim)
    if tuple(key.shape) != shape or query.shape[1] != geometry.num_query_heads:
        return f"caches keys of shape {tuple(key.shape)} in layer {layer}, where its config says {shape}"
    if not isinstance(mask, MaskRecord):
        return f"brings a mask of its own ({type(mask).__name__}) in layer {layer}"
    if arguments.get("scaling") is None:
        return f"does not tell attention its scale in layer {layer}"
    if arguments.get("position_bias") is not None:
        return f"adds a position bias to its logits in layer {layer}"
    return None


def _weights(run: _Run, query: Tensor, key: Tensor, record: MaskRecord, arguments: Any) -> Tensor:
    """Return attention weights [B, Q, T, N] as policies compute them."""
    weighting, rows, tokens = Weighting.of(arguments), key.shape[2], query.shape[2]
    keys = key.float().repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    logits = weighting.cap_(query.float() @ keys.transpose(2, 3) * float(arguments["scaling"]))
    columns = torch.arange(run.fed, device=key.device)
    allowed = record.allows(columns[run.fed - tokens :].view(1, 1, -1, 1), columns[run.fed - rows :].view(1, 1, 1, -1))
    return weighting.weights(logits.masked_fill(~allowed, float("-inf")))


def _difference(wanted: Any, found: dict[int, list[Tensor]], geometry: CacheGeometry, dtype: torch.dtype) -> str | None:
    if wanted is None or len(wanted) != geometry.total_layers:
        return "returns no attention weights under its eager function, so nothing can be compared"
    for layer, pieces in found.items():
        start = 0
        for weights in pieces:
            end = start + weights.shape[2]
            # A sliding layer has let go of its oldest rows, which eager's weights show as zeros.
            eager = wanted[layer][:, :, start:end, end - weights.shape[3] : end].float().to(weights.device)
            error = float((weights - eager).abs().max())
            if not error <= _tolerance(dtype):
                return (
                    f"weighs rows in layer {layer} differently from the scaled products of its queries and cached keys "
                    f"(by up to {error:.2g})"
                )
            start = end
    return None


def _tolerance(dtype: torch.dtype) -> float:
    return _TOLERANCE.get(dtype, _COARSE_TOLERANCE)


def _scale(value: Tensor) -> float:
    return max(1.0, float(value.abs().max()))


def _mask(**arguments: Any) -> MaskRecord:
    run = _RUN.get()
    assert run is not None, "only a probe uses this name"
    return MaskRecord(run.backend, arguments)


@contextmanager
def _named(model: Any, name: str) -> Iterator[None]:
    before = str(model.config._attn_implementation)
    if name == "eager" and not hasattr(sys.modules[type(model).__module__], "eager_attention_forward"):
        raise UnsupportedModelError(f"{type(model).__name__} has no eager attention function of its own")
    try:
        if before != name and not set_implementation(model, name):
            raise UnsupportedModelError(f"{type(model).__name__} keeps its own attention implementation")
        yield
    finally:
        if str(model.config._attn_implementation) != before:
            set_implementation(model, before)
