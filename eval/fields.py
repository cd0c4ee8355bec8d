"""Small checks shared by everything that reads a YAML document."""

from __future__ import annotations

import importlib.resources
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, did_you_mean

__all__ = [
    "boolean",
    "check_keys",
    "distinct",
    "integer",
    "integers",
    "items",
    "mapping",
    "parse_override",
    "parse_value",
    "read_yaml_mapping",
    "set_dotted",
    "shipped_config",
    "text",
]


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping.

    Raises:
        ConfigError: no such file, not YAML in UTF-8, or not a mapping.
    """
    if not path.is_file():
        raise ConfigError(f"There is no sweep file {str(path)!r}. Give the path of a YAML file.")
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: {error}. Save it as UTF-8.") from error
    return _mapping_of(content, str(path))


def shipped_config(name: str) -> dict[str, Any] | None:
    """A YAML mapping from the package's own configs, such as `models/NAME.yaml`, or None if it has none."""
    # A folder or a hub name has slashes of its own and is never a shipped config.
    if name.count("/") != 1:
        return None
    resource = importlib.resources.files("hf_kvpolicy.configs").joinpath(name)
    return _mapping_of(resource.read_text(encoding="utf-8"), name) if resource.is_file() else None


def _mapping_of(text: str, where: str) -> dict[str, Any]:
    document = parse_value(text, where=where)
    if not isinstance(document, dict):
        raise ConfigError(f"{where} must hold a mapping; it holds a {type(document).__name__}.")
    return document


def parse_override(text: str) -> tuple[str, Any]:
    """Read one `--set` argument, `a.b=c`; the value is YAML.

    Raises:
        ConfigError: there is no `=`, or what follows it is not YAML.
    """
    dotted, separator, value = text.partition("=")
    if not separator or not dotted:
        raise ConfigError(f"--set {text!r} has no '='. Write it as a.b=value, for example tasks.0.num_examples=5.")
    return dotted, parse_value(value, where=f"--set {text!r}")


def parse_value(text: str, *, where: str) -> Any:
    """Read YAML.

    Raises:
        ConfigError: it is not YAML.
    """
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from error


def set_dotted(document: dict[str, Any], dotted: str, value: Any) -> None:
    """Set `a.b.0.c` in nested mappings and lists, in place; missing mappings are made.

    Raises:
        ConfigError: a step of the path names no list element.
    """
    node: Any = document
    steps = dotted.split(".")
    for step, following in zip(steps, [*steps[1:], None], strict=True):
        key: Any = step
        if isinstance(node, list):
            if not step.isdigit() or int(step) >= len(node):
                raise ConfigError(
                    f"--set {dotted!r}: {step!r} is no element of a list of {len(node)}. Count elements from 0."
                )
            key = int(step)
        elif not isinstance(node, dict):
            raise ConfigError(f"--set {dotted!r}: the value before {step!r} is no mapping or list.")
        if following is None:
            node[key] = value
        else:
            node = node[key] if isinstance(node, list) else node.setdefault(step, {})


def check_keys(value: Any, allowed: Iterable[str], *, required: Iterable[str] = (), where: str) -> None:
    """Refuse anything but a mapping with allowed keys and all required ones.

    Raises:
        ConfigError: with the closest allowed key when one is unknown.
    """
    allowed = list(allowed)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a mapping with the keys {', '.join(allowed)}; got {value!r}.")
    for key in value:
        if key not in allowed:
            raise ConfigError(
                f"{where} has the unknown key {key!r}; allowed are {', '.join(allowed)}."
                f"{did_you_mean(str(key), allowed)}"
            )
    missing = [key for key in required if key not in value]
    if missing:
        raise ConfigError(f"{where} lacks the key {missing[0]!r}. Add it.")


def items(document: Mapping[str, Any], key: str) -> list[Any]:
    """The non-empty list under `key`."""
    value = document[key]
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{key} must be a list with at least one entry; got {value!r}.")
    return value


def mapping(value: Any, *, where: str) -> dict[str, Any]:
    """A mapping whose keys are names."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} must be a mapping from names to values; got {value!r}.")
    return dict(value)


def text(value: Any, *, where: str) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be a name; got {value!r}.")
    return value


def distinct(values: Iterable[Any], *, where: str) -> None:
    """Refuse values that name one thing twice: it would be run, or counted, twice."""
    found: list[Any] = []
    for value in values:
        if any(value == other and type(value) is type(other) for other in found):
            raise ConfigError(f"{where} names {value!r} twice. Leave one of them out.")
        found.append(value)


def integer(value: Any, *, where: str, minimum: int) -> int:
    """An int of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ConfigError(f"{where} must be a whole number of at least {minimum}; got {value!r}.")
    return value


def boolean(value: Any, *, where: str) -> bool:
    """True or false, and nothing that only looks like it."""
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false; got {value!r}.")
    return value


def integers(value: Any, *, where: str, minimum: int) -> list[int]:
    """A non-empty list of ints of at least `minimum`."""
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where} must be a list of whole numbers; got {value!r}.")
    return [integer(item, where=f"{where}[{index}]", minimum=minimum) for index, item in enumerate(value)]
