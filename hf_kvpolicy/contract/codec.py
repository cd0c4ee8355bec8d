"""Records to and from plain dicts, driven by their dataclass fields.

Field metadata steers it: `record` names the class of a nested record, `key` the name used in the dict where
it differs from the field (the attribute of that name is then read, so a lazy field can be resolved by a
property), `optional` leaves a nested record out where it is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any, TypeVar

from ..errors import ManifestError, did_you_mean
from .canonical import JsonValue, to_plain_json

__all__ = ["record_from_dict", "record_to_dict"]

Record = TypeVar("Record")


def _public_fields(record: Any) -> dict[str, Field[Any]]:
    return {f.metadata.get("key", f.name): f for f in fields(record) if f.init}


def record_to_dict(record: Any) -> dict[str, JsonValue]:
    """Return the public fields of a dataclass record as plain JSON values, nested records included."""
    plain: dict[str, JsonValue] = {}
    for key, field in _public_fields(record).items():
        value = getattr(record, key)
        if value is None and field.metadata.get("optional"):
            continue
        plain[key] = record_to_dict(value) if is_dataclass(value) else to_plain_json(value, where=key)
    return plain


def record_from_dict(cls: type[Record], data: object, *, where: str) -> Record:
    """Build `cls` from a mapping as written by `record_to_dict`; `where` names the record in messages.

    Raises ManifestError for unknown keys (with a suggestion), missing keys and whatever `cls` refuses.
    """
    if not isinstance(data, Mapping):
        raise ManifestError(
            f"{where} must be a mapping of {cls.__name__} fields, but {type(data).__name__} was given. "
            "Pass what to_dict() returns."
        )
    known = _public_fields(cls)
    for key in data:
        if key not in known:
            raise ManifestError(
                f"{where} has the unknown key {key!r}. Allowed are {', '.join(sorted(known))}."
                f"{did_you_mean(str(key), known)}"
            )
    missing = [key for key, f in known.items() if _required(f) and key not in data]
    if missing:
        raise ManifestError(f"{where} lacks {', '.join(missing)}. Add every field {cls.__name__} requires.")
    arguments: dict[str, Any] = {}
    for key, value in data.items():
        field = known[key]
        nested = field.metadata.get("record")
        arguments[field.name] = record_from_dict(nested, value, where=f"{where}.{key}") if nested else value
    return cls(**arguments)


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING
