"""From the parts of an example to the token ids of a prompt: template, answer prefix, exactly one BOS."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from .tasks.base import Example

__all__ = ["EncodedPrompt", "PromptEncoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """Token ids of one prompt and of its gold answer as the model would continue with it."""

    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    sha256: str


class PromptEncoder:
    """Encodes examples for one tokenizer.

    With a chat template the context and question are one user turn and the answer prefix follows the
    assistant header, so that the model continues a sentence it already started. Without one the parts are
    concatenated.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        template = tokenizer.chat_template
        self._template: str | None = template if isinstance(template, str) else None
        self._bos_id: int | None = tokenizer.bos_token_id
        self._tokenizer_adds_bos = self._bos_id is not None and self._starts_with_bos(tokenizer("a")["input_ids"])

    @property
    def uses_chat_template(self) -> bool:
        """Whether prompts go through the tokenizer's chat template."""
        return self._template is not None

    @property
    def template_sha256(self) -> str:
        """Digest of the chat template; of the empty string when the tokenizer has none."""
        return hashlib.sha256((self._template or "").encode()).hexdigest()

    @property
    def tokenizer_sha256(self) -> str:
        """Digest of the tokenizer's vocabulary, which decides how examples are sized."""
        vocabulary = sorted(self._tokenizer.get_vocab().items())
        return hashlib.sha256(repr(vocabulary).encode()).hexdigest()

    def count(self, text: str) -> int:
        """Tokens of a piece of text, without special tokens."""
        return len(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def character_spans(self, text: str) -> list[tuple[int, int]]:
        """The characters [begin, end) that each token of a text stands for, without special tokens.

        Raises:
            ConfigError: the tokenizer cannot say (slow tokenizers).
        """
        if not getattr(self._tokenizer, "is_fast", False):
            raise ConfigError(
                f"{type(self._tokenizer).__name__} does not say which characters a token stands for. "
                "Use the model's fast tokenizer."
            )
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [(int(begin), int(end)) for begin, end in encoded["offset_mapping"]]

    def text(self, example: Example) -> str:
        """The prompt as text, up to and including the answer prefix."""
        user_turn = f"{example.context}\n\n{example.question}"
        if not self.uses_chat_template:
            return f"{user_turn}\n{example.answer_prefix}"
        turns = [{"role": "user", "content": user_turn}]
        rendered = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return f"{rendered}{example.answer_prefix}"

    def encode(self, example: Example) -> EncodedPrompt:
        """Token ids of the prompt, and of the first gold answer with the space that the prefix leaves out."""
        prompt_text = self.text(example)
        prompt = self._ids(prompt_text)
        continued = self._ids(f"{prompt_text} {example.answers[0]}")
        # A tokenizer may merge the answer into the prefix's last token; then the answer is encoded alone.
        answer = continued[len(prompt) :]
        if continued[: len(prompt)] != prompt:
            answer = self._tokenizer(f" {example.answers[0]}", add_special_tokens=False)["input_ids"]
        digest = hashlib.sha256(repr(prompt).encode()).hexdigest()
        return EncodedPrompt(token_ids=tuple(prompt), answer_ids=tuple(answer), sha256=digest)

    def _ids(self, text: str) -> list[int]:
        """Ids with exactly one leading BOS where the template or the tokenizer uses one, else none."""
        ids: list[int] = list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if self._bos_id is None or not (self._tokenizer_adds_bos or self._starts_with_bos(ids)):
            return ids
        while self._starts_with_bos(ids):
            ids = ids[1:]
        return [self._bos_id, *ids]

    def _starts_with_bos(self, ids: list[int]) -> bool:
        return bool(ids) and ids[0] == self._bos_id
