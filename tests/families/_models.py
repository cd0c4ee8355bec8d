"""A tiny model of any family, whichever table it is in."""

from __future__ import annotations

from typing import Any

import helpers

from . import _alibi_models, _table


def model_of(family: str, **options: Any) -> Any:
    """Return a fresh, unattached tiny random model."""
    if family in _alibi_models.MODELS:
        return _alibi_models.model_of(family, **options)
    return helpers.tiny(family, **options) if family in helpers.FAMILIES else _table.tiny(family, **options)
