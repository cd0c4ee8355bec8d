"""Imports point one way, as the table in ARCHITECTURE.md says."""

from __future__ import annotations

from pathlib import Path

import pytest

from ._sources import (
    AXES,
    LIBRARY,
    MAPPED,
    PACKAGES,
    ROOT,
    allowed_rooms,
    dotted,
    imports_of,
    python_files,
    room_of,
    table_of_rooms,
)

# Imports inside functions that go against the direction, each with its reason.
LAZY_EXCEPTIONS = {
    ("cache", "attach"): "a cache made from a model attaches it",
    ("cache", "persistence"): "a cache saves itself",
}
TRANSFORMERS_FILES = {
    "hf_kvpolicy/compat.py", "hf_kvpolicy/layers.py", "hf_kvpolicy/cache.py", "hf_kvpolicy/attach.py",
    "hf_kvpolicy/policies/base.py", "hf_kvpolicy/trace.py",
}  # fmt: skip
FILES = [path for package in PACKAGES for path in python_files(package)]
LISTED = {room for rooms, _ in table_of_rooms() for room in rooms}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_table_of_rooms_is_read() -> None:
    assert {"errors", "geometry", "contract", "engine", "cache", "policies", *AXES, *MAPPED} <= LISTED
    assert allowed_rooms("contract") == {"errors", "geometry", "contract"}
    assert allowed_rooms("errors") == {"errors"}
    assert "attach" not in (allowed_rooms("engine") or set())


def test_every_module_is_in_the_table() -> None:
    rooms = {room_of(dotted(path)) for path in python_files(LIBRARY)} - {"", "__main__"}
    assert not sorted(rooms - LISTED), "ARCHITECTURE.md says who owns what; these modules are not in its table"


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_follow_the_table(path: Path) -> None:
    room = room_of(dotted(path))
    allowed = allowed_rooms(room)
    if allowed is None:
        return
    wrong = []
    for found in imports_of(path):
        if found.module.split(".")[0] != LIBRARY:
            continue
        target = room_of(found.module)
        if target == room or target in allowed or target not in LISTED | {""}:
            continue
        if found.lazy and (room, target) in LAZY_EXCEPTIONS:
            continue
        wrong.append(f"line {found.line}: {room} imports {found.module}")
    assert not wrong


def test_lazy_exceptions_are_still_needed() -> None:
    used = {
        (room_of(dotted(path)), room_of(found.module))
        for path in FILES
        for found in imports_of(path)
        if found.lazy and found.module.startswith(LIBRARY)
    }
    assert set(LAZY_EXCEPTIONS) <= used


@pytest.mark.parametrize("axis", AXES)
def test_axes_never_import_each_other(axis: str) -> None:
    for path in python_files(f"{LIBRARY}/{axis}"):
        targets = {room_of(i.module) for i in imports_of(path) if i.module.split(".")[0] == LIBRARY}
        assert targets <= {axis, "errors", "geometry", "contract", "weighting"}, name(path)


def test_the_contract_imports_only_errors_and_geometry() -> None:
    for path in python_files(f"{LIBRARY}/contract"):
        targets = {room_of(i.module) for i in imports_of(path) if i.module.split(".")[0] == LIBRARY}
        assert targets <= {"contract", "errors", "geometry"}, name(path)


@pytest.mark.parametrize("path", [p for p in FILES if p.relative_to(ROOT).parts[0] != "eval"], ids=name)
def test_only_the_seams_know_transformers(path: Path) -> None:
    if name(path) in TRANSFORMERS_FILES or path.is_relative_to(ROOT / "model_patches"):
        return
    if room_of(dotted(path)) in LISTED and allowed_rooms(room_of(dotted(path))) is None:
        return  # the command: it may import everything
    assert not [i for i in imports_of(path) if i.module.split(".")[0] == "transformers"]


def test_only_compat_asks_for_versions() -> None:
    asking = [name(p) for p in python_files(LIBRARY) if "transformers.__version__" in p.read_text(encoding="utf-8")]
    assert set(asking) <= {"hf_kvpolicy/compat.py"}


@pytest.mark.parametrize("path", FILES, ids=name)
def test_nothing_imports_tests_or_scripts(path: Path) -> None:
    tops = {i.module.split(".")[0] for i in imports_of(path)}
    assert not tops & {"tests", "scripts", "eval", "configs", "model_patches"}, "use hf_kvpolicy.eval and the like"
