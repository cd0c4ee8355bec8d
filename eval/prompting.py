"""From the parts of an example to token ids: chat template, segments, answer prefix, at most one added BOS."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import ConfigError
from .tasks.base import Example, Turn

__all__ = ["EncodedPrompt", "PromptEncoder"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedPrompt:
    """Token ids of one prompt and of its gold answer as the model would continue with it.

    `segment_ends` are the token counts after which a cache may select: the prompt is fed in these pieces.
    `added_bos_tokens` (0 or 1) stand before the ids of the text. `template_preamble` is what the chat template put in
    front of the first turn by itself; empty where it adds nothing, or was not used.
    """

    token_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    segment_ends: tuple[int, ...]
    sha256: str
    added_bos_tokens: int
    template_preamble: str

    @property
    def segments(self) -> tuple[tuple[int, ...], ...]:
        """The pieces of the prompt, in order."""
        begins = (0, *self.segment_ends[:-1])
        return tuple(self.token_ids[begin:end] for begin, end in zip(begins, self.segment_ends, strict=True))


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

    @cached_property
    def template_preamble(self) -> str:
        """What the chat template puts in front of the first turn by itself, such as a system message of its own.

        It is what stands before the first user's text and not before a later one's.
        """
        if not self.uses_chat_template:
            return ""
        rendered = self._rendered([Turn(user="first user", assistant="first answer")], "second user")
        before, _, after = rendered.partition("first user")
        between = after.partition("first answer")[2].partition("second user")[0]
        # By ids, not by letters: two markers may end alike.
        ids, opening = self._plain_ids(before), self._plain_ids(between)
        while ids and opening and ids[-1] == opening[-1]:
            ids.pop()
            opening.pop()
        return "" if ids == [self._bos_id] else str(self._tokenizer.decode(ids))

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

    def cut_middle(self, text: str, max_tokens: int) -> tuple[str, int]:
        """The text with its middle cut out so that about `max_tokens` tokens stay, and how many tokens went.

        Both halves are decoded and joined without a mark, as LongBench does; the joint may tokenise a little longer.
        """
        ids = self._tokenizer(text)["input_ids"]
        if len(ids) <= max_tokens:
            return text, 0
        half = max_tokens // 2
        first, last = ids[:half], ids[len(ids) - half :]
        parts = [self._tokenizer.decode(part, skip_special_tokens=True) for part in (first, last)]
        return "".join(parts), len(ids) - 2 * half

    def text(self, example: Example) -> str:
        """The prompt as text, up to and including the answer prefix."""
        question = f"{example.context}{example.joint}{example.question}"
        if not (self.uses_chat_template and example.chat_template):
            turns = "".join(f"{turn.user}\n{turn.assistant}\n\n" for turn in example.earlier_turns)
            return f"{turns}{question}\n{example.answer_prefix}" if example.answer_prefix else f"{turns}{question}"
        return f"{self._rendered(example.earlier_turns, question)}{example.answer_prefix}"

    def count_prompt(self, example: Example) -> int:
        """Tokens of the prompt that `encode` makes, without finding its segments or encoding the gold answer."""
        return len(self._ids(self.text(example), templated=self.uses_chat_template and example.chat_template))

    def encode(self, example: Example, *, query_aware: bool = True) -> EncodedPrompt:
        """Token ids of the prompt, where its segments end, and the gold answer as a continuation.

        Args:
            example: what is asked.
            query_aware: whether context and question are fed as one segment; else a cache selects before it has seen
                the question. Earlier turns are segments of their own either way.

        Raises:
            ConfigError: the chat template changes a text that a segment ends with.
        """
        prompt_text = self.text(example)
        templated = self.uses_chat_template and example.chat_template
        plain = self._plain_ids(prompt_text)
        bos = [] if templated else self._bos_before(plain)
        prompt = [*bos, *plain]
        joint = "" if not example.answer_prefix or example.answer_prefix[-1].isspace() else " "
        continued = self._ids(f"{prompt_text}{joint}{example.gold_text}", templated=templated)
        # A tokenizer may merge the answer into the prefix's last token; then the answer is encoded alone.
        answer = continued[len(prompt) :]
        if continued[: len(prompt)] != prompt:
            answer = self._tokenizer(f"{joint}{example.gold_text}", add_special_tokens=False)["input_ids"]
        return EncodedPrompt(
            token_ids=tuple(prompt),
            answer_ids=tuple(answer),
            segment_ends=self._segment_ends(example, prompt_text, prompt, query_aware=query_aware),
            sha256=hashlib.sha256(repr(prompt).encode()).hexdigest(),
            added_bos_tokens=len(bos),
            template_preamble=self.template_preamble if templated else "",
        )

    def _rendered(self, earlier_turns: Iterable[Turn], question: str) -> str:
        turns = [
            {"role": role, "content": content}
            for turn in earlier_turns
            for role, content in (("user", turn.user), ("assistant", turn.assistant))
        ]
        turns.append({"role": "user", "content": question})
        rendered: str = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return rendered

    def _segment_ends(
        self, example: Example, prompt_text: str, prompt: list[int], *, query_aware: bool
    ) -> tuple[int, ...]:
        """Token counts at which a cache is given time to select; the last is the whole prompt."""
        cuts = []
        search_from = 0
        tail = example.question.strip()
        try:
            for turn in example.earlier_turns:
                # A template may trim or wrap what it is given, so the text is looked for rather than counted.
                search_from = prompt_text.index(turn.assistant.strip(), search_from) + len(turn.assistant.strip())
                cuts.append(search_from)
            if not query_aware and tail and example.context:
                # The prefix of the answer may repeat the question.
                cuts.append(prompt_text.rindex(tail, 0, len(prompt_text) - len(example.answer_prefix)))
        except ValueError as error:
            raise ConfigError(
                f"The chat template changes what it is given, so that example {example.example_id} cannot be fed in "
                "segments. Give query_aware: true and tasks without earlier turns, or a tokenizer with another "
                "template."
            ) from error
        ends = [self._tokens_before(prompt_text, prompt, cut) for cut in cuts]
        return (*sorted({end for end in ends if 0 < end < len(prompt)}), len(prompt))

    def _tokens_before(self, text: str, ids: list[int], character: int) -> int:
        """How many of the prompt's tokens lie wholly before a character; a token across it belongs behind."""
        if getattr(self._tokenizer, "is_fast", False):
            spans = self.character_spans(text)
            added = len(ids) - len(spans)
            return added + sum(last <= character for _, last in spans)
        alone = self._tokenizer(text[:character], add_special_tokens=False)["input_ids"]
        added = int(bool(ids) and ids[0] == self._bos_id and not self._starts_with_bos(alone))
        same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(alone, ids[added:], strict=False))
        return added + sum(1 for _ in same)

    def _plain_ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _ids(self, text: str, *, templated: bool) -> list[int]:
        """Ids of a rendered template as they are; else with one BOS where the tokenizer adds one by itself."""
        ids = self._plain_ids(text)
        return ids if templated else [*self._bos_before(ids), *ids]

    def _bos_before(self, ids: list[int]) -> list[int]:
        adds = self._tokenizer_adds_bos and not self._starts_with_bos(ids)
        return [self._bos_id] if adds and self._bos_id is not None else []

    def _starts_with_bos(self, ids: list[int]) -> bool:
        return bool(ids) and ids[0] == self._bos_id
