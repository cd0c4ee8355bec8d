"""The two files of a saved cache, and how a directory comes to be in one step."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError

__all__ = [
    "FORMAT",
    "FORMAT_VERSION",
    "RECORD_FILE",
    "TENSOR_FILE",
    "described",
    "file_sha256",
    "model_dtype",
    "scalar_name",
    "write_directory",
]

RECORD_FILE, TENSOR_FILE = "cache.json", "cache.safetensors"
FORMAT, FORMAT_VERSION = "hf_kvpolicy.cache", 1


def write_directory(target: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary sibling, then move it to its place; on any failure nothing changes."""
    if target.exists() and not (target.is_dir() and {p.name for p in target.iterdir()} <= {RECORD_FILE, TENSOR_FILE}):
        raise ConfigError(
            f"{str(target)!r} exists and is not a saved cache; it is not replaced. Give another directory."
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = uuid.uuid4().hex[:12]
    temporary, earlier = (target.with_name(f".{target.name}.{mark}.{kind}") for kind in ("tmp", "old"))
    temporary.mkdir()
    try:
        write(temporary)
        for file in temporary.iterdir():
            _sync(file)
        replaces = target.exists()
        if replaces:
            target.rename(earlier)
        try:
            temporary.rename(target)
        except BaseException:
            if replaces:
                earlier.rename(target)
            raise
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(earlier, ignore_errors=True)


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def described(tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return dtype and shape of named tensors as plain JSON values."""
    return {name: {"dtype": scalar_name(t.dtype), "shape": list(t.shape)} for name, t in sorted(tensors.items())}


def scalar_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")


def model_dtype(decoder: torch.nn.Module | None) -> torch.dtype:
    """Return the dtype of a decoder's weights."""
    assert decoder is not None, "a cache with a known checkpoint has a living model"
    return next(decoder.parameters()).dtype
