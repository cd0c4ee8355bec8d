"""Reading the sources: modules by room, their imports, the table of ARCHITECTURE.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIBRARY = "hf_kvpolicy"
# Folders mapped into the package by pyproject.toml: they are hf_kvpolicy.model_patches and hf_kvpolicy.eval.
MAPPED = ("model_patches", "eval")
PACKAGES = (LIBRARY, *MAPPED)
AXES = ("evidence", "allocation", "selection", "storage", "representation", "positions")


@dataclass(frozen=True)
class Import:
    """One imported module of this project, by its full dotted name, or a foreign top-level package."""

    module: str
    line: int
    # Inside a function: evaluated late, so it can close a cycle on purpose.
    lazy: bool


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def dotted(path: Path) -> str:
    """Return the import name of a file, as an installed package knows it."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] in MAPPED:
        parts.insert(0, LIBRARY)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """Return the room a module lies in: the name below hf_kvpolicy; '' for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imports_of(path: Path) -> list[Import]:
    """Return every import that runs; those under TYPE_CHECKING do not."""
    package = dotted(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    return list(_walk(tree_of(path), package, lazy=False))


def _walk(node: ast.AST, package: list[str], *, lazy: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, lazy) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = package[: len(package) - child.level + 1] if child.level else []
            module = ".".join([*base, *([child.module] if child.module else [])])
            if child.module is None or module == LIBRARY:
                # `from . import x` and `from hf_kvpolicy import x`: x may be a module.
                yield from (Import(_module_or_package(module, alias.name), child.lineno, lazy) for alias in child.names)
            else:
                yield Import(module, child.lineno, lazy)
        else:
            inside = lazy or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _walk(child, package, lazy=inside)


def _module_or_package(package: str, name: str) -> str:
    parts = package.split(".")[1:]
    for folder in (ROOT / LIBRARY, ROOT):
        place = folder.joinpath(*parts, name)
        if place.is_dir() or place.with_suffix(".py").exists():
            return f"{package}.{name}"
    return package


@cache
def table_of_rooms() -> list[tuple[tuple[str, ...], str]]:
    """Return the rows of ARCHITECTURE.md's table of rooms: (rooms, what they may import)."""
    rows = []
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = text.split("## Rooms", 1)[1].split("\n## ", 1)[0]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 3 and "`" in cells[0]:
            rooms = tuple(name.removesuffix(".py").rstrip("/") for name in re.findall(r"`([\w./]+)`", cells[0]))
            rows.append((rooms, cells[2]))
    return rows


def allowed_rooms(room: str) -> set[str] | None:
    """Return the rooms one room may import by the table; None where it may import everything or is not listed."""
    above: set[str] = set()
    for rooms, rule in table_of_rooms():
        if room in rooms:
            if rule == "everything":
                return None
            named = above if rule == "above" else {word.strip() for word in rule.split(",") if word.strip() != "-"}
            # The files of one row belong together, except the axes, which have a row each.
            return named | set(rooms)
        above |= set(rooms)
    return None
