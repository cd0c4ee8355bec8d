"""Canonical JSON and its SHA-256: the identity of a record (Canonical Identity, 0x01A).

Object keys are sorted at every depth; array order is kept, because it carries meaning for axes, head maps and
position lists. Values outside JSON are refused: turned into text, two meanings could share a digest.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from ..errors import ManifestError

__all__ = ["FrozenMapping", "JsonValue", "canonical_json", "sha256_of", "to_plain_json"]

JsonValue: TypeAlias = "bool | int | float | str | list[JsonValue] | dict[str, JsonValue] | None"


def to_plain_json(value: object, *, where: str = "value") -> JsonValue:
    """Return `value` as plain JSON types; tuples become lists, mappings become dicts.

    Raises ManifestError for non-finite floats, non-string keys and types JSON cannot carry (sets, tensors,
    dtypes, callables); `where` names the value in the message.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        raise ManifestError(
            f"{where} is {value}, which JSON cannot represent. Use a finite number, or null for 'no value'."
        )
    if isinstance(value, Mapping):
        return {_text_key(key, where): to_plain_json(v, where=f"{where}.{key}") for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain_json(item, where=f"{where}[{i}]") for i, item in enumerate(value)]
    raise ManifestError(
        f"{where} has type {type(value).__name__}, which has no canonical JSON form. Allowed are null, "
        "bool, int, float, str, list, tuple and mappings with string keys; convert the value first."
    )


def _text_key(key: object, where: str) -> str:
    if isinstance(key, str):
        return key
    raise ManifestError(
        f"{where} has the key {key!r} of type {type(key).__name__}, but keys of canonical JSON are strings. "
        "Convert the key to a string."
    )


def canonical_json(value: object) -> str:
    """Return the one text of `value`: keys sorted recursively, arrays in order, ASCII, no white space.

    Raises ManifestError for anything that is not JSON (see `to_plain_json`).
    """
    return json.dumps(to_plain_json(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256_of(value: object) -> str:
    """Return the hexadecimal SHA-256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode("ascii")).hexdigest()


class FrozenMapping(Mapping[str, JsonValue]):
    """A read-only, hashable, picklable mapping of JSON values.

    Reading a value returns a fresh copy of nested lists and dicts, so nothing reachable can be edited in
    place.
    """

    __slots__ = ("_text",)

    def __init__(self, values: Mapping[str, object], *, where: str = "options") -> None:
        self._text = canonical_json(to_plain_json(values, where=where))

    def _values(self) -> dict[str, JsonValue]:
        values: dict[str, JsonValue] = json.loads(self._text)
        return values

    def __getitem__(self, key: str) -> JsonValue:
        return self._values()[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __len__(self) -> int:
        return len(self._values())

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return f"FrozenMapping({self._text})"
