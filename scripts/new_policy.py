"""Scaffold a policy that runs: its file, config, reference, test and docs row, and its names where policies are listed.

It starts as a window of the newest rows. Replace the evidence, the reference and the texts by those of your method.
"""

from __future__ import annotations

import argparse
import keyword
import re
import sys
from pathlib import Path

DOCS_MARKER = "<!-- scripts/new_policy adds a row above this line -->"
TEMPLATES = Path(__file__).parent / "new_policy_templates"

# Where each template goes, relative to the repository.
TARGETS = {
    "policy.txt": "hf_kvpolicy/policies/retention/{name}.py",
    "config.txt": "configs/policies/{name}.yaml",
    "reference.txt": "tests/reference/{name}.py",
    "test.txt": "tests/policies/test_{name}.py",
}
# Modules that list every policy's class. Each imports it from the package below.
LISTINGS = {
    "hf_kvpolicy/policies/retention/__init__.py": ".{name}",
    "hf_kvpolicy/policies/__init__.py": ".retention",
    "hf_kvpolicy/__init__.py": ".policies",
}


class ScaffoldError(Exception):
    """The policy cannot be scaffolded; nothing was written."""


def class_name(name: str) -> str:
    return "".join(word.capitalize() for word in name.split("_")) + "Cache"


def check_name(name: str) -> None:
    """Refuse what cannot be a module, a registry name and a class.

    Raises:
        ScaffoldError: with the rule that the name breaks.
    """
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name) or keyword.iskeyword(name):
        raise ScaffoldError(
            f"{name!r} cannot name a policy. Use lower-case words joined by single underscores, "
            "starting with a letter, and no Python keyword: for example every_other."
        )


def check_free(root: Path, name: str) -> None:
    """Refuse a name that is registered, or whose files are there.

    Raises:
        ScaffoldError: names what is in the way.
    """
    registered = re.compile(rf'@register_policy\("{name}"\)|^class {class_name(name)}\b', re.MULTILINE)
    for path in sorted((root / "hf_kvpolicy").rglob("*.py")):
        if registered.search(path.read_text(encoding="utf-8")):
            raise ScaffoldError(f"A policy {name!r} exists already, in {path.relative_to(root)}. Use another name.")
    for target in TARGETS.values():
        if (root / target.format(name=name)).exists():
            raise ScaffoldError(f"{target.format(name=name)} exists already. Use another name, or move that file.")


def with_import(text: str, module: str, cls: str) -> str:
    """Add `cls` to what a listing imports from `module` and to its `__all__`, in order.

    Raises:
        ScaffoldError: the listing has another shape than expected.
    """
    block = re.compile(rf"^from {re.escape(module)} import (?:\((?P<many>[^)]*)\)|(?P<few>[^\n]*))\n", re.MULTILINE)
    found = block.search(text)
    if found:
        names = re.findall(r"\w+", found["many"] or found["few"])
        text = text[: found.start()] + _import(module, [*names, cls]) + text[found.end() :]
    else:
        text = _insert_import(text, module, cls)
    exported = re.search(r"^__all__ = \[(?P<names>[^\]]*)\]", text, re.MULTILINE)
    if exported is None:
        raise ScaffoldError("A module that lists policies has no __all__; add the class by hand.")
    names = sorted({*re.findall(r'"(\w+)"', exported["names"]), cls}, key=_ruff_order)
    listing = "__all__ = [\n" + "".join(f'    "{entry}",\n' for entry in names) + "]"
    return text[: exported.start()] + listing + text[exported.end() :]


def _import(module: str, names: list[str]) -> str:
    return f"from {module} import (\n" + "".join(f"    {n},\n" for n in sorted(set(names), key=_ruff_order)) + ")\n"


def _ruff_order(name: str) -> tuple[int, str]:
    """Constants, then classes, then the rest, as the linter sorts them."""
    return (0 if name.isupper() else 1 if name[0].isupper() else 2), name


def _insert_import(text: str, module: str, cls: str) -> str:
    lines = text.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if re.match(r"from \.\w+ import ", line)]
    if not places:
        raise ScaffoldError(f"A module that lists policies imports nothing beside {module}; add the class by hand.")
    after = [i for i in places if lines[i].split()[1] < module]
    lines.insert(after[-1] + 1 if after else places[0], f"from {module} import {cls}\n")
    return "".join(lines)


def with_docs_row(text: str, name: str) -> str:
    if DOCS_MARKER not in text:
        raise ScaffoldError(f"docs/policies.md lacks the line {DOCS_MARKER!r}, above which a policy's row goes.")
    row = f"| `{name}` | `{class_name(name)}` | - | describe in a line which rows it keeps |\n"
    return text.replace(DOCS_MARKER, row + DOCS_MARKER, 1)


def scaffold(root: Path, name: str) -> list[Path]:
    """Write a policy's files and return them. Everything is checked and rendered before the first is written.

    Raises:
        ScaffoldError: the name is bad or taken, or a listing has changed its shape.
    """
    check_name(name)
    check_free(root, name)
    cls = class_name(name)
    written = {}
    for template, target in TARGETS.items():
        text = (TEMPLATES / template).read_text(encoding="utf-8")
        written[root / target.format(name=name)] = text.replace("@NAME@", name).replace("@CLASS@", cls)
    for listing, module in LISTINGS.items():
        path = root / listing
        written[path] = with_import(path.read_text(encoding="utf-8"), module.format(name=name), cls)
    docs = root / "docs/policies.md"
    written[docs] = with_docs_row(docs.read_text(encoding="utf-8"), name)
    for path, text in written.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(written)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/new_policy", description=__doc__)
    parser.add_argument("name", help="snake_case, for example every_other")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help=argparse.SUPPRESS)
    parsed = parser.parse_args(arguments)
    try:
        paths = scaffold(parsed.root, parsed.name)
    except ScaffoldError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(path.relative_to(parsed.root))
    print(f"\nIt runs as it is. Try: pytest tests/policies/test_{parsed.name}.py; then see CONTRIBUTING.md.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
