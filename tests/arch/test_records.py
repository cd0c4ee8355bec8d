"""Records are frozen, and what is published by a package is really there."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from pathlib import Path

import pytest

from ._sources import AXES, LIBRARY, ROOT, dotted, python_files

# Rooms whose every public dataclass is a record; elsewhere, those a package or module of the surface exports.
RECORD_ROOMS = ("contract", "allocation", "policies", *AXES)
SURFACE = (
    "hf_kvpolicy", "hf_kvpolicy.engine", "hf_kvpolicy.geometry", "hf_kvpolicy.ledger", "hf_kvpolicy.config",
    "hf_kvpolicy.records", "hf_kvpolicy.registry", "hf_kvpolicy.model_patches",
)  # fmt: skip


def public_dataclasses() -> dict[str, type]:
    modules = [dotted(p) for room in RECORD_ROOMS for p in python_files(f"{LIBRARY}/{room}")]
    found = {}
    for module in dict.fromkeys([*modules, *SURFACE]):
        loaded = importlib.import_module(module)
        for name in getattr(loaded, "__all__", ()):
            thing = getattr(loaded, name)
            if inspect.isclass(thing) and dataclasses.is_dataclass(thing):
                found[f"{thing.__module__}.{thing.__qualname__}"] = thing
    return found


@pytest.mark.parametrize("name", sorted(public_dataclasses()))
def test_public_dataclasses_are_frozen(name: str) -> None:
    assert public_dataclasses()[name].__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_records_were_found() -> None:
    names = {name.rsplit(".", 1)[1] for name in public_dataclasses()}
    assert {"KVPolicyState", "RowMap", "Budget", "Snapshot", "Ledger", "Composition", "CacheGeometry"} <= names


@pytest.mark.parametrize("path", python_files(LIBRARY), ids=lambda p: str(p.relative_to(ROOT)))
def test_every_exported_name_exists(path: Path) -> None:
    if "import triton" in path.read_text(encoding="utf-8"):
        pytest.importorskip("triton", reason="kernels need triton, which comes with torch for CUDA")
    module = importlib.import_module(dotted(path))
    exported = getattr(module, "__all__", ())
    assert len(set(exported)) == len(exported)
    for name in exported:
        assert hasattr(module, name), f"{module.__name__}.__all__ names {name}, which does not exist"
