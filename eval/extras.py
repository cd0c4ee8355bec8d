"""Imports of the optional packages, with an error that says how to get them."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from types import ModuleType

from ..errors import ConfigError

__all__ = ["package_folder", "require"]


def require(module: str, purpose: str, *, extra: str = "eval") -> ModuleType:
    """Import an optional module that `extra` brings.

    Raises:
        ConfigError: it is not installed; names what needs it and the extra that brings it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{purpose} needs the package {module.split('.')[0]!r}, which cannot be imported ({error}). "
            f"Install the extra with `pip install 'hf-kvpolicy[{extra}]'`, or `pip install '.[{extra}]'` in a checkout."
        ) from error


def package_folder(package: str, purpose: str) -> Path:
    """Folder of an installed package of texts, without importing it: only its files are read.

    Raises:
        ConfigError: it is not installed; names what needs it and the extra that brings it.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"{purpose} needs the texts of the package {package.replace('_', '-')!r}, which is not installed. Install "
            "the data extra with `pip install 'hf-kvpolicy[data]'`, or `pip install '.[data]'` in a checkout."
        )
    return Path(spec.submodule_search_locations[0])
