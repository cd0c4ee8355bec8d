"""Which token ids are special, and which are punctuation alone: as given, or read from a tokenizer or a config."""

from __future__ import annotations

import string
import unicodedata
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from ..errors import ConfigError
from ..geometry import text_config

__all__ = ["punctuation_ids", "special_ids"]

# How byte-level vocabularies write a space; SentencePiece writes the other one.
_BYTE_SPACE, _PIECE_SPACE = "\u0120", "\u2581"


def special_ids(policy: str, model_or_config: Any, tokenizer: Any, given: Iterable[int] | None) -> tuple[int, ...]:
    """Return the ids given, else the tokenizer's special ones, else the begin, end and pad ids of the config.

    Raises:
        ConfigError: an id is no whole number from 0.
    """
    if given is not None:
        return _checked(policy, "special_token_ids", given)
    if tokenizer is not None:
        return _checked(policy, "special_token_ids", tokenizer.all_special_ids)
    config = text_config(getattr(model_or_config, "config", model_or_config))
    named = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    # A model may end with any of several tokens.
    flat = [token for entry in named for token in (entry if isinstance(entry, list | tuple) else [entry])]
    return _checked(policy, "special_token_ids", [token for token in flat if token is not None])


def punctuation_ids(policy: str, tokenizer: Any, given: Iterable[int] | None) -> tuple[int, ...]:
    """Return the ids given, else those of the tokenizer's entries that are punctuation alone, else none.

    Raises:
        ConfigError: an id is no whole number from 0.
    """
    if given is not None or tokenizer is None:
        return _checked(policy, "punctuation_token_ids", given or ())
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    byte_level = any(word.startswith(_BYTE_SPACE) for word in vocabulary)
    found = [token for word, token in vocabulary.items() if _is_punctuation(_text(word) if byte_level else word)]
    return _checked(policy, "punctuation_token_ids", found)


def _is_punctuation(word: str) -> bool:
    bare = word.removeprefix("##").lstrip(_PIECE_SPACE + " ")
    return bool(bare) and all(mark in string.punctuation or unicodedata.category(mark)[0] == "P" for mark in bare)


def _text(word: str) -> str:
    """Return the text of a byte-level entry; nothing for one that is part of a character."""
    alphabet = _byte_alphabet()
    try:
        return bytes(alphabet[symbol] for symbol in word).decode()
    except (KeyError, UnicodeDecodeError):
        return ""


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each symbol: printable Latin-1 stands for itself, other bytes for U+0100 and what follows."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _checked(policy: str, name: str, given: Iterable[int]) -> tuple[int, ...]:
    ids: list[Any] = list(given)
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ConfigError(f"{policy}: {name} lists token ids, whole numbers from 0; got {token!r}.")
    return tuple(sorted(set(ids)))
