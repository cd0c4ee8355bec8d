"""Names and numbers for needles: adjective-noun keys and seven-digit values."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import lru_cache

from ..extras import require

__all__ = ["KeyWords", "key_words", "made_up_words", "plain_words", "random_value"]

# Used when `wonderwords` is not installed; 24 x 24 keys are enough for small runs.
# fmt: off
_ADJECTIVES = (
    "amber", "blue", "brave", "calm", "clever", "cold", "dusty", "early", "faint", "gentle", "golden",
    "green", "happy", "hidden", "jolly", "late", "lively", "narrow", "patient", "quiet", "round",
    "silver", "steep", "tall",
)
_NOUNS = (
    "anchor", "basket", "bridge", "candle", "castle", "cloud", "dragon", "engine", "feather", "garden",
    "hammer", "island", "kettle", "lantern", "meadow", "mirror", "orchard", "pebble", "planet", "rabbit",
    "river", "saddle", "tower", "violin",
)
# fmt: on
_WORD_CHARS = range(4, 10)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWords:
    """Word lists for keys and where they come from."""

    source: str
    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]

    def draw(self, rng: random.Random, count: int) -> list[str]:
        """`count` different keys of the form adjective-noun."""
        keys: dict[str, None] = {}
        while len(keys) < min(count, len(self.adjectives) * len(self.nouns)):
            keys[f"{rng.choice(self.adjectives)}-{rng.choice(self.nouns)}"] = None
        return list(keys)


@lru_cache(maxsize=1)
def key_words() -> KeyWords:
    """The word lists of `wonderwords` if it is installed, else the built-in ones."""
    try:
        import wonderwords
    except ImportError:
        return KeyWords(source="built-in", adjectives=_ADJECTIVES, nouns=_NOUNS)
    words = wonderwords.RandomWord()
    return KeyWords(
        source=f"wonderwords {wonderwords.__version__}",
        adjectives=_plain(words.filter(include_categories=["adjective"])),
        nouns=_plain(words.filter(include_categories=["noun"])),
    )


@lru_cache(maxsize=1)
def plain_words() -> tuple[str, ...]:
    """Nouns, adjectives and verbs of `wonderwords`, in a fixed order.

    Raises:
        ConfigError: the package is not installed.
    """
    words = require("wonderwords", "A list of words").RandomWord()
    return _plain(words.filter(include_categories=["noun", "adjective", "verb"]))


def _plain(words: list[str]) -> tuple[str, ...]:
    """Lower-case ASCII words of ordinary length, in a fixed order."""
    fits = {w for w in words if w.isascii() and w.isalpha() and w.islower() and len(w) in _WORD_CHARS}
    return tuple(sorted(fits))


def random_value(rng: random.Random) -> str:
    """A seven-digit number that does not start with zero."""
    return str(rng.randrange(1_000_000, 10_000_000))


def made_up_words(rng: random.Random, count: int) -> list[str]:
    """`count` different pronounceable words of three syllables that are in no dictionary."""
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    # Different first syllables make different words.
    firsts = rng.sample(syllables, count)
    return [f"{first}{rng.choice(syllables)}{rng.choice(syllables)}" for first in firsts]
