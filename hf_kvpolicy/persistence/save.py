"""Writing a cache."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from ..cache import PolicyCache
from ..compat import transformers_version
from ..config import policy_options
from ..contract import sha256_of, to_plain_json
from ..errors import ConfigError
from ..registry import policy_class
from .codec import encode
from .files import (
    FORMAT,
    FORMAT_VERSION,
    RECORD_FILE,
    TENSOR_FILE,
    described,
    file_sha256,
    model_dtype,
    scalar_name,
    write_directory,
)

__all__ = ["save_cache"]


def save_cache(cache: PolicyCache, directory: str | os.PathLike[str]) -> None:
    """Write a cache to a directory, replacing an earlier save there (see the package's docstring).

    Raises:
        ConfigError: tokens wait for acceptance, a forward is in flight, the policy cannot be rebuilt by name and
            options, the cache is not bound to a living model, or the directory holds something else.
    """
    runtime = cache._runtime
    if runtime.waiting is not None or runtime.step is not None:
        raise ConfigError(
            "The last forward of this cache waits for acceptance or did not finish, and saving does not decide about "
            "its tokens. Call cache.crop(0) to accept them, cache.crop(-n) to reject the last n, or cache.rollback() "
            "to drop a forward that did not finish."
        )
    manifest = cache.manifest
    if manifest.checkpoint_generation == "unbound":
        raise ConfigError("The model of this cache no longer exists, so the save could not name its checkpoint.")
    facts, tensors = encode(runtime.snapshot)
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    record: dict[str, Any] = {
        "policy": cache.composition.policy,
        "options": _constructor_options(cache),
        "geometry": to_plain_json(asdict(cache.geometry)),
        "model_dtype": scalar_name(model_dtype(None if cache._decoder is None else cache._decoder())),
        "manifest": manifest.to_dict(),
        "manifest_sha256": manifest.sha256,
        "request_id": cache._identity.request_id,
        "parent": None if runtime.parent is None else asdict(runtime.parent),
        "highest_issued": asdict(runtime.clock.highest),
        "statistics": asdict(runtime.statistics),
        "recording": runtime.recording,
        "recorded_any": runtime.recorded_any,
        "snapshot": facts,
        "tensors": described(on_host),
        "torch": torch.__version__,
        "transformers": transformers_version(),
    }

    def write(place: Path) -> None:
        save_file(on_host, place / TENSOR_FILE)
        record["tensor_file_sha256"] = file_sha256(place / TENSOR_FILE)
        envelope = {
            "format": FORMAT,
            "format_version": FORMAT_VERSION,
            "record_sha256": sha256_of(record),
            "record": record,
        }
        (place / RECORD_FILE).write_text(json.dumps(envelope, indent=1, sort_keys=True) + "\n", encoding="utf-8")

    write_directory(Path(directory).absolute(), write)


def _constructor_options(cache: PolicyCache) -> Any:
    composition = cache.composition
    if policy_class(composition.policy) is not type(cache):
        raise ConfigError(
            f"{type(cache).__name__} is not the class registered as {composition.policy!r}, so a save could not be "
            "loaded. Register it with @register_policy under a name of its own."
        )
    missing = [name for name in policy_options(composition.policy) if name not in composition.options]
    if missing:
        raise ConfigError(
            f"{type(cache).__name__} does not record its options {', '.join(missing)}, so it could not be rebuilt. "
            "Let its constructor put every option into Composition.options."
        )
    return to_plain_json(composition.options, where="options")
