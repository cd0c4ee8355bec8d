"""One task over several texts: NAME_sotu, NAME_pydoc, and NAME over a file of the user.

The text is part of the name, because scores over one text say little about another.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeAlias

from ...errors import ConfigError
from .base import Task, TaskEntry
from .haystack import Haystack, load_haystack, pydoc_prose, sotu_prose

__all__ = ["Prose", "prose_entries", "prose_provenance"]

Prose: TypeAlias = "Callable[[], Haystack]"

_BUILT_IN: Mapping[str, Prose] = {"sotu": sotu_prose, "pydoc": pydoc_prose}


def prose_entries(
    name: str, make: Callable[..., Task], about: str, *, text_param: str, params: tuple[str, ...] = ()
) -> dict[str, TaskEntry]:
    """Entries of one task, one a text.

    Args:
        name: the name over a file of the user.
        make: takes the name, the keyword `prose` (called for the text when it is needed) and `params`.
        about: one line without the text.
        text_param: name of the parameter that gives the file.
        params: names of the other parameters.
    """
    built_in = {
        f"{name}_{text}": TaskEntry(make=partial(make, prose=prose), about=f"{about}; text: {text}", params=params)
        for text, prose in _BUILT_IN.items()
    }
    own = partial(_with_own_text, make, text_param)
    return {
        **built_in,
        name: TaskEntry(make=own, about=f"{about}; text: a file of yours", params=(text_param, *params)),
    }


def prose_provenance(prose: Haystack) -> dict[str, str]:
    """Name, licence and digest of a text."""
    return {"haystack": prose.name, "haystack_licence": prose.licence, "haystack_sha256": prose.sha256}


def _with_own_text(make: Callable[..., Task], text_param: str, name: str, **params: Any) -> Task:
    path = params.pop(text_param, None)
    if path is None or not Path(path).exists():
        alternatives = " or ".join(f"{name}_{text}" for text in _BUILT_IN)
        raise ConfigError(
            f"Task {name!r} is over a text of yours: {text_param} is {path!r}. Give the path of a text in the "
            f"parameter {text_param}, or ask for {alternatives}, whose texts come with a package."
        )
    return make(name, prose=partial(_loaded, str(path)), **params)


@lru_cache(maxsize=4)
def _loaded(path: str) -> Haystack:
    return load_haystack(path)
