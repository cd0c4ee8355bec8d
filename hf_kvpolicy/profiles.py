"""Profiles: what was measured once for a checkpoint, in a file that says how and on which weights (0x08G).

A profile holds one number per (layer, query head): importances for HeadKV, rows that hold most of the attention for
ZigZagKV. The numbers belong to one checkpoint; `admit` refuses every other one.

Letters: L layers, Q query heads, H KV heads.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from .allocation import query_to_kv_importance
from .contract import FrozenMapping, sha256_of
from .errors import CheckpointAdmissionError, ConfigError, IntegrityError
from .fingerprint import weights_fingerprint
from .geometry import CacheGeometry

__all__ = ["PROFILE_KINDS", "Profile", "load_profile", "save_profile", "shipped_profile"]

PROFILE_KINDS = ("headkv", "zigzagkv")
_FORMAT, _FORMAT_VERSION = "hf_kvpolicy profile", 1
_FIELDS = ("kind", "model", "weights_sha256", "tokenizer_sha256", "data", "measurement", "versions", "query_heads_LQ")
_Table = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Numbers per (layer, query head) of one checkpoint, and where they come from."""

    # "headkv": importances, of any scale; "zigzagkv": rows that hold a share of a head's attention (MBA).
    kind: str
    # The name it was loaded by, for readers; `weights_sha256` is what counts.
    model: str
    weights_sha256: str
    tokenizer_sha256: str
    # The text the prompts were made of: name, licence, digest.
    data: Mapping[str, Any]
    # Probe, lengths, depths, counts, seed: enough to measure again.
    measurement: Mapping[str, Any]
    versions: Mapping[str, Any]
    num_kv_heads: int
    query_heads_LQ: _Table

    def __post_init__(self) -> None:
        """Reject a table that no model has.

        Raises:
            ConfigError: the kind is unknown, a number is negative or not finite, or the table's sizes do not fit.
        """
        if self.kind not in PROFILE_KINDS:
            raise ConfigError(f"A profile is of the kind {' or '.join(PROFILE_KINDS)}; got {self.kind!r}.")
        for name in ("data", "measurement", "versions"):
            object.__setattr__(self, name, FrozenMapping(getattr(self, name), where=name))
        table = tuple(tuple(float(value) for value in layer) for layer in self.query_heads_LQ)
        object.__setattr__(self, "query_heads_LQ", table)
        widths = {len(layer) for layer in table}
        if len(widths) != 1 or self.num_kv_heads < 1 or min(widths) < 1 or min(widths) % self.num_kv_heads:
            raise ConfigError(
                f"A profile has one number per layer and query head, and as many query heads for each of its KV heads; "
                f"got layers of {sorted(widths)} query heads and {self.num_kv_heads} KV heads."
            )
        if any(not 0 <= value < float("inf") for layer in table for value in layer):
            raise ConfigError("The numbers of a profile are finite and not negative; some are not. Measure again.")

    @property
    def kv_heads_LH(self) -> _Table:
        """One number per (layer, KV head): the sum of its query heads' importances, or the mean of their rows."""
        group = len(self.query_heads_LQ[0]) // self.num_kv_heads
        divisor = 1 if self.kind == "headkv" else group
        # Summed as the decimals that were written: 0.1 + 0.2 is 0.3.
        return tuple(
            tuple(float(total / divisor) for total in query_to_kv_importance(layer, group))
            for layer in self.query_heads_LQ
        )

    @property
    def layers_L(self) -> tuple[float, ...]:
        """One number per layer: the sum of importances, or the mean of rows (LMBA)."""
        width = len(self.query_heads_LQ[0])
        divisor = 1 if self.kind == "headkv" else width
        return tuple(float(query_to_kv_importance(layer, width)[0] / divisor) for layer in self.query_heads_LQ)

    @property
    def sha256(self) -> str:
        """Digest of everything in the profile."""
        return sha256_of(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Return the record as plain JSON values; what follows from the query heads' numbers is written out too."""
        geometry = {
            "num_layers": len(self.query_heads_LQ),
            "num_query_heads": len(self.query_heads_LQ[0]),
            "num_kv_heads": self.num_kv_heads,
        }
        named: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        for name in ("data", "measurement", "versions"):
            named[name] = dict(named[name])
        tables = {"query_heads_LQ": _lists(self.query_heads_LQ), "kv_heads_LH": _lists(self.kv_heads_LH)}
        return {**named, "geometry": geometry, **tables, "layers_L": list(self.layers_L)}

    def check_geometry(self, geometry: CacheGeometry) -> None:
        """Refuse a model of another shape.

        Raises:
            CheckpointAdmissionError: layers or heads differ.
        """
        own = (len(self.query_heads_LQ), len(self.query_heads_LQ[0]), self.num_kv_heads)
        found = (geometry.num_layers, geometry.num_query_heads, geometry.num_kv_heads)
        if own != found:
            raise CheckpointAdmissionError(
                f"The {self.kind} profile of {self.model!r} is for (layers, query heads, KV heads) {own}, but this "
                f"model has {found}. {_remedy(self.kind)}"
            )

    def admit(self, decoder: torch.nn.Module) -> None:
        """Refuse a model whose weights are not the ones that were measured.

        Raises:
            CheckpointAdmissionError: layers, heads or weights differ.
        """
        self.check_geometry(CacheGeometry.from_config(decoder.config))
        found = weights_fingerprint(decoder)
        if found != self.weights_sha256:
            raise CheckpointAdmissionError(
                f"The {self.kind} profile of {self.model!r} was measured on weights with the digest "
                f"{self.weights_sha256[:12]}, but this model's have {found[:12]}; what one checkpoint's heads do says "
                f"nothing about another's. {_remedy(self.kind)}"
            )


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile as JSON, with its digest.

    Raises:
        ConfigError: the file cannot be written.
    """
    envelope = {
        "format": _FORMAT,
        "format_version": _FORMAT_VERSION,
        "profile_sha256": profile.sha256,
        "profile": profile.to_dict(),
    }
    text = json.dumps(envelope, indent=1)
    # Lists of numbers on one line each.
    text = re.sub(r"\[\s+([^][{}]+?)\s+\]", lambda found: f"[{' '.join(found[1].split())}]", text)
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The profile {str(path)!r} cannot be written: {error}.") from error


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """Read a profile and verify it.

    Raises:
        ConfigError: the file cannot be read, or has a format of another version.
        IntegrityError: it is no profile, or was altered.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The profile {str(path)!r} cannot be read: {error}.") from error
    return _parse(text, str(path))


def shipped_profile(kind: str, decoder: torch.nn.Module) -> Profile:
    """Return the profile in `configs/profiles/` that was measured on these weights.

    Raises:
        CheckpointAdmissionError: there is none.
    """
    found, shipped = weights_fingerprint(decoder), [profile for profile in _shipped() if profile.kind == kind]
    for profile in shipped:
        if profile.weights_sha256 == found:
            return profile
    names = ", ".join(sorted(profile.model for profile in shipped)) or "no checkpoint"
    raise CheckpointAdmissionError(
        f"No {kind} profile comes with the library for this {type(decoder).__name__} (weights with the digest "
        f"{found[:12]}); there are profiles for {names}. {_remedy(kind)}"
    )


@lru_cache(maxsize=1)
def _shipped() -> tuple[Profile, ...]:
    folder = importlib.resources.files("hf_kvpolicy.configs").joinpath("profiles")
    files = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return tuple(_parse(file.read_text(encoding="utf-8"), file.name) for file in files)


def _parse(text: str, name: str) -> Profile:
    try:
        envelope = json.loads(text)
    except ValueError as error:
        raise IntegrityError(f"The profile {name!r} is truncated or was altered: {error}. Measure again.") from error
    if not isinstance(envelope, dict) or envelope.get("format") != _FORMAT:
        raise IntegrityError(f"{name!r} is not a profile. Give a file that `kvpolicy calibrate` wrote.")
    if envelope.get("format_version") != _FORMAT_VERSION:
        raise ConfigError(
            f"The profile {name!r} has format version {envelope.get('format_version')!r}, but this library reads "
            f"version {_FORMAT_VERSION}. Use the version of hf_kvpolicy that wrote it, or measure again."
        )
    record = envelope.get("profile")
    if not isinstance(record, dict) or envelope.get("profile_sha256") != sha256_of(record):
        raise IntegrityError(f"The profile {name!r} was altered after it was written: its digest differs.")
    try:
        profile = Profile(num_kv_heads=record["geometry"]["num_kv_heads"], **{name: record[name] for name in _FIELDS})
    except (KeyError, TypeError, ValueError) as error:
        raise IntegrityError(
            f"The profile {name!r} lacks something or has it in the wrong form ({error!r})."
        ) from error
    if profile.to_dict() != record:
        raise IntegrityError(
            f"The profile {name!r} contradicts itself: its sizes, or its numbers per KV head and layer, do not follow "
            "from those per query head. Measure again."
        )
    return profile


def _lists(table: _Table) -> list[list[float]]:
    return [list(layer) for layer in table]


def _remedy(kind: str) -> str:
    measure = f"Run `kvpolicy calibrate {kind} --model MODEL --out profile.json`"
    if kind != "headkv":
        return f"{measure}."
    return f"{measure} and give profile='profile.json', or use profile='uniform'."
