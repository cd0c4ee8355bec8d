"""Imports of the optional packages, with an error that says how to get them."""

from __future__ import annotations

import importlib
from types import ModuleType

from ..errors import ConfigError

__all__ = ["require"]


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
