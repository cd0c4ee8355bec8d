"""A run in one small file: its rows as columns, so that results can be kept beside the code and reported again."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from ..contract.canonical import canonical_json
from ..errors import IntegrityError
from .records import SCHEMA_VERSION, CacheRecord, QualityRecord, Row, TimingRecord

__all__ = ["PackedRun", "write_packed"]

_PARTS: Mapping[str, type] = {"quality": QualityRecord, "cache": CacheRecord, "timing": TimingRecord}
_ROW_COLUMNS = ("row_key", "status", "outcome", "reason")
_SHARED = ("cell_key", "cell", "environment", "policy", "schema_version")


class PackedRun:
    """A file of `write_packed`, read as if it were the run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read_run(self) -> dict[str, Any]:
        """Configuration, digests and versions of the run."""
        run: dict[str, Any] = self._document()["run"]
        return run

    def rows(self) -> list[Row]:
        """Every row, as the run's folder had it."""
        document = self._document()
        return [row for cell in document["cells"] for row in _unpacked(cell, document["examples"])]

    def _document(self) -> dict[str, Any]:
        try:
            document: dict[str, Any] = json.loads(self.path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise IntegrityError(f"{self.path} is not JSON: {error}. Give a file that `eval pack` wrote.") from error
        if not isinstance(document, dict) or document.get("packed_schema_version") != SCHEMA_VERSION:
            raise IntegrityError(
                f"{self.path} is no packed run of schema version {SCHEMA_VERSION}. Give a file that "
                "`kvpolicy eval pack` wrote with this version."
            )
        missing = [key for key in ("run", "cells", "examples") if key not in document]
        if missing:
            raise IntegrityError(f"{self.path} is damaged: it holds no {missing[0]!r}. Pack the run's folder again.")
        return document


def write_packed(run: Mapping[str, Any], rows: Iterable[Row], path: Path) -> None:
    """Write a run into one JSON file; nothing of its rows is lost."""
    examples: dict[str, Any] = {}
    groups: dict[str, list[tuple[Row, str]]] = defaultdict(list)
    for row in rows:
        key = _example_key(row.example, examples)
        groups[canonical_json([getattr(row, name) for name in _SHARED])].append((row, key))
    lines = [json.dumps(_packed(group), sort_keys=True, ensure_ascii=False) for group in groups.values()]
    # One line a cell: small, and a difference between two files still shows which cell it is in.
    # The folder that the model lay in means nothing on another machine; its name and digests stay.
    portable = {name: value for name, value in run.items() if name != "model_source"}
    head = {"packed_schema_version": SCHEMA_VERSION, "run": portable, "examples": examples}
    text = json.dumps(head, sort_keys=True, ensure_ascii=False)[:-1] + ', "cells": [\n' + ",\n".join(lines) + "\n]}\n"
    path.write_text(text, encoding="utf-8")


def _example_key(example: Mapping[str, Any], examples: dict[str, Any]) -> str:
    """Keep an example's record and return its key: the id, and a number where records of one id differ.

    They do where the prompt does: without its text, or with the question in a segment of its own.
    """
    key, number = str(example["id"]), 1
    while examples.setdefault(key, example) != example:
        number += 1
        key = f"{example['id']}-{number}"
    return key


def _packed(group: list[tuple[Row, str]]) -> dict[str, Any]:
    """The rows of one cell as columns; a part that a failed row lacks is null in each of its columns."""
    rows = [row for row, _ in group]
    shared = {name: getattr(rows[0], name) for name in _SHARED}
    columns: dict[str, Any] = {name: [getattr(row, name) for row in rows] for name in _ROW_COLUMNS}
    for part, kind in _PARTS.items():
        records = [getattr(row, part) for row in rows]
        columns[part] = {
            field.name: [record and getattr(record, field.name) for record in records] for field in fields(kind)
        }
    return {**shared, **columns, "example": [key for _, key in group]}


def _unpacked(cell: Mapping[str, Any], examples: Mapping[str, Any]) -> Iterable[Row]:
    shared = {name: cell[name] for name in _SHARED}
    for index, example in enumerate(cell["example"]):
        row = {name: cell[name][index] for name in _ROW_COLUMNS}
        parts = {part: _record(cell[part], index) for part in _PARTS}
        yield Row.from_mapping({**shared, **row, **parts, "example": examples[example]})


def _record(columns: Mapping[str, list[Any]], index: int) -> dict[str, Any] | None:
    values = {name: column[index] for name, column in columns.items()}
    return None if all(value is None for value in values.values()) else values
