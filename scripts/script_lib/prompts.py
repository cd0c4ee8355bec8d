"""A needle prompt of a wanted length, from text that every Python installation carries."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pydoc_data.topics import topics
from typing import Any

QUESTION = "What is the special magic number for {key} mentioned in the provided text?"
INTRODUCTION = (
    "A special magic number is hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the number afterwards.\n"
)
NEEDLE = "One of the special magic numbers for {key} is: {value}."
# Echoes the needle's sentence: otherwise a small model's skill at following instructions is what is tested.
ANSWER_PREFIX = "The special magic number for {key} mentioned in the provided text is:"
# What the frame around the haystack takes: introduction, needle, question, chat markers, answer prefix.
FRAME_TOKENS = 120


@dataclass(frozen=True)
class NeedlePrompt:
    input_ids: list[int]
    gold_ids: list[int]
    value: str
    needle_span: tuple[int, int]
    """First and one past the last token of the needle's sentence."""


def haystack_sentences() -> list[str]:
    """The prose of CPython's language reference, cut at full stops; tables and code are left out."""
    text = " ".join(topics[name] for name in sorted(topics))
    text = re.sub(r"\s+", " ", re.sub(r"[*`|+=\-_~^\"]{2,}|[*`|]", " ", text))
    return [s for s in re.split(r"(?<=[.!?]) ", text) if 30 <= len(s) <= 300]


def _haystack(tokenizer: Any, tokens: int) -> list[str]:
    chosen: list[str] = []
    total = 0
    for sentence in haystack_sentences():
        total += len(tokenizer(" " + sentence, add_special_tokens=False).input_ids)
        if total > tokens:
            return chosen
        chosen.append(sentence)
    raise ValueError(
        f"The built-in text holds {total} tokens, fewer than the {tokens} asked for. Ask for fewer tokens."
    )


def _framed(tokenizer: Any, user: str, prefix: str) -> str:
    """The user's turn in the model's own chat format, followed by the beginning of the answer."""
    if not getattr(tokenizer, "chat_template", None):
        return f"{user}\n{prefix}"
    messages = [{"role": "user", "content": user}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)) + prefix


def _token_span(tokenizer: Any, text: str, part: str) -> tuple[int, int]:
    begin = text.index(part)
    offsets = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    inside = [i for i, (a, b) in enumerate(offsets) if a < begin + len(part) and b > begin]
    return inside[0], inside[-1] + 1


def needle_prompt(
    tokenizer: Any, tokens: int, *, depth: float = 0.3, key: str = "quiet-harbour", value: str = "4917362"
) -> NeedlePrompt:
    """A prompt of about `tokens` tokens, the needle at `depth` of its haystack, the question at its end."""
    sentences = _haystack(tokenizer, tokens - FRAME_TOKENS)
    needle = NEEDLE.format(key=key, value=value)
    sentences.insert(int(len(sentences) * depth), needle)
    user = f"{INTRODUCTION}{' '.join(sentences)}\n{QUESTION.format(key=key)}"
    text = _framed(tokenizer, user, ANSWER_PREFIX.format(key=key))
    ids = tokenizer(text, add_special_tokens=False).input_ids
    whole = tokenizer(f"{text} {value}", add_special_tokens=False).input_ids
    if whole[: len(ids)] != ids:
        raise ValueError("This tokenizer merges the answer into its prefix, so the answer cannot be scored by token.")
    return NeedlePrompt(ids, whole[len(ids) :], value, _token_span(tokenizer, text, needle))


def filler_ids(tokenizer: Any, tokens: int) -> list[int]:
    """Exactly `tokens` tokens of prose, for timings that do not depend on what is asked."""
    text = " ".join(_haystack(tokenizer, tokens + 400))
    return list(tokenizer(text, add_special_tokens=False).input_ids[:tokens])
