"""Reading a cache, with every check before use."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from ..attach import attached_backend, detach, family_of, unwrap
from ..cache import PolicyCache
from ..compat import stock_layers, transformers_version
from ..config import policy_options
from ..contract import Generations, sha256_of, to_plain_json
from ..engine import RunStatistics
from ..errors import CheckpointAdmissionError, ConfigError, IntegrityError, ManifestError
from ..fingerprint import checkpoint_fingerprint
from ..geometry import CacheGeometry
from ..records import Identity
from ..registry import policy_class
from ..storage import stored_tensors
from ..weights import computing_device
from .codec import decode
from .files import FORMAT, FORMAT_VERSION, RECORD_FILE, TENSOR_FILE, described, file_sha256, model_dtype, scalar_name

__all__ = ["load_cache"]


def load_cache(directory: str | os.PathLike[str], model: torch.nn.Module) -> PolicyCache:
    """Return the cache saved in a directory, bound to a model (which is attached); it continues bit for bit.

    Raises:
        ConfigError: there is no saved cache, its format or policy is unknown, or geometry or dtype is not the model's.
        CheckpointAdmissionError: the cache belongs to other weights.
        ManifestError: the policy means something else here than when the cache was saved.
        IntegrityError: a file is missing, truncated or altered, or the content contradicts itself.
    """
    place, inner = Path(directory), unwrap(model)
    record = _read_record(place)
    try:
        decoder = family_of(inner).decoder(inner)
        _admit_policy(record)
        _admit_model(record, decoder)
        tensors = _read_tensors(place, record)
        config: Any = decoder.config
        geometry = CacheGeometry.from_config(config)
        devices = _layer_devices(decoder, geometry.total_layers)
        layer_devices = [devices[layer] for layer in geometry.model_layers]
        stock = stock_layers(config, geometry.foreign_layers)
        foreign = [(layer, devices[i]) for layer, i in zip(stock, geometry.foreign_layers, strict=True)]
        with stored_tensors():
            snapshot = decode(record["snapshot"], tensors, computing_device(decoder), layer_devices, foreign)
        state = {
            "highest": Generations(**record["highest_issued"]),
            "parent": None if record["parent"] is None else Generations(**record["parent"]),
            "statistics": RunStatistics(**record["statistics"]),
            "recording": record["recording"],
            "recorded_any": record["recorded_any"],
        }
        identity = Identity(request_id=record["request_id"])
    except (KeyError, TypeError, IndexError) as error:
        raise IntegrityError(
            f"The record of the saved cache in {str(place)!r} lacks something or has it in the wrong form ({error!r}). "
            "Save the cache again."
        ) from error
    was_attached = attached_backend(inner) is not None
    try:
        cache: PolicyCache = policy_class(record["policy"])(model, **record["options"])
        cache._runtime.restore(snapshot, **state)
        cache._identity = identity
        _check_manifest(cache, record)
        _check_content(cache, place)
    except BaseException:
        if not was_attached:
            detach(inner)
        raise
    return cache


def _read_record(place: Path) -> dict[str, Any]:
    record_file, tensor_file = place / RECORD_FILE, place / TENSOR_FILE
    if not record_file.is_file() and not tensor_file.is_file():
        raise ConfigError(f"There is no saved cache in {str(place)!r}; give the directory that save_pretrained wrote.")
    for file in (record_file, tensor_file):
        if not file.is_file():
            raise IntegrityError(f"The saved cache in {str(place)!r} lacks the file {file.name}. Save the cache again.")
    try:
        envelope = json.loads(record_file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise IntegrityError(f"{record_file} is truncated or was altered: {error}. Save the cache again.") from error
    if not isinstance(envelope, dict) or envelope.get("format") != FORMAT:
        raise IntegrityError(f"{record_file} is not the record of a saved cache. Save the cache again.")
    if envelope.get("format_version") != FORMAT_VERSION:
        raise ConfigError(
            f"{record_file} has format version {envelope.get('format_version')!r}, but this library reads version "
            f"{FORMAT_VERSION}. Load it with the version of hf_kvpolicy that saved it."
        )
    record = envelope.get("record")
    if not isinstance(record, dict) or envelope.get("record_sha256") != sha256_of(record):
        raise IntegrityError(f"{record_file} was altered after it was saved: its digest differs. Save the cache again.")
    return record


def _read_tensors(place: Path, record: dict[str, Any]) -> dict[str, Tensor]:
    file = place / TENSOR_FILE
    if file_sha256(file) != record["tensor_file_sha256"]:
        raise IntegrityError(f"{file} is truncated or was altered: its SHA-256 differs. Save the cache again.")
    try:
        tensors: dict[str, Tensor] = load_file(file)
    except (SafetensorError, ValueError) as error:
        raise IntegrityError(f"{file} is not a tensor file that can be read: {error}. Save the cache again.") from error
    if described(tensors) != record["tensors"]:
        raise IntegrityError(f"{file} holds other tensors than its record names. Save the cache again.")
    return tensors


def _admit_policy(record: dict[str, Any]) -> None:
    known = policy_options(record["policy"])
    foreign = sorted(set(record["options"]) - set(known))
    if foreign:
        raise ConfigError(
            f"The saved cache was made with options that the policy {record['policy']!r} does not have here: "
            f"{', '.join(foreign)}. Load it with the version of hf_kvpolicy that saved it."
        )


def _admit_model(record: dict[str, Any], decoder: torch.nn.Module) -> None:
    config: Any = decoder.config
    found: Any = to_plain_json(asdict(CacheGeometry.from_config(config)))
    saved = record["geometry"]
    if found != saved:
        differing = [f"{key} {saved.get(key)} (model: {found[key]})" for key in found if found[key] != saved.get(key)]
        raise ConfigError(
            f"The saved cache has another geometry than the model: {', '.join(differing)}. Give its model."
        )
    dtype = scalar_name(model_dtype(decoder))
    if dtype != record["model_dtype"]:
        raise ConfigError(
            f"The cache was saved from a model in {record['model_dtype']}, but this one is in {dtype}. "
            f"Load the model with dtype=torch.{record['model_dtype']}."
        )
    if checkpoint_fingerprint(decoder) != record["manifest"]["checkpoint_generation"]:
        raise CheckpointAdmissionError(
            "The saved cache belongs to other weights: the checkpoint's fingerprint differs, and rows of one model "
            f"mean nothing to another. Give the model it was saved from (transformers {record['transformers']} then, "
            f"{transformers_version()} now)."
        )


def _check_content(cache: PolicyCache, place: Path) -> None:
    try:
        cache.check_integrity()
    except IntegrityError as error:
        raise IntegrityError(f"The content of {str(place)!r} is unsound. {error}. Save the cache again.") from error


def _check_manifest(cache: PolicyCache, record: dict[str, Any]) -> None:
    if cache.manifest.sha256 == record["manifest_sha256"] == sha256_of(record["manifest"]):
        return
    now, then = cache.manifest.to_dict(), record["manifest"]
    differing = sorted(key for key in {*now, *then} if now.get(key) != then.get(key))
    raise ManifestError(
        f"The policy {record['policy']!r} means something else here than when the cache was saved; it differs in "
        f"{', '.join(differing) or 'its digest'}. Load it with the version of hf_kvpolicy that saved it."
    )


def _layer_devices(decoder: torch.nn.Module, layers: int) -> list[torch.device]:
    """Return where each layer computes; the decoder's first device where a layer cannot be told."""
    devices = [computing_device(decoder)] * layers
    for module in decoder.modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and 0 <= layer < layers and next(module.parameters(), None) is not None:
            devices[layer] = computing_device(module)
    return devices
