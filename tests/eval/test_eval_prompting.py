"""One BOS, the answer prefix after the assistant header, and the gold answer's tokens."""

from __future__ import annotations

from typing import Any

import pytest
from eval_fakes import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.tasks.base import Example

BOS = 256
EXAMPLE = Example(context="Text.", question="What?", answer_prefix="It is", answers=("42",))


def adding_bos(tokenizer: Any) -> Any:
    """The same tokenizer, but one that puts a BOS in front by itself."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def test_prefix_follows_the_assistant_header() -> None:
    text = PromptEncoder(tiny_tokenizer()).text(EXAMPLE)
    assert text == "<s>user Text.\n\nWhat?</s><s>assistant It is"


def test_without_a_template_the_parts_are_concatenated() -> None:
    encoder = PromptEncoder(tiny_tokenizer(chat=False))
    assert not encoder.uses_chat_template
    assert encoder.text(EXAMPLE) == "Text.\n\nWhat?\nIt is"


@pytest.mark.parametrize(
    ("chat", "adds", "leading"), [(True, True, 1), (True, False, 1), (False, True, 1), (False, False, 0)]
)
def test_exactly_one_leading_bos_where_one_is_used(chat: bool, adds: bool, leading: int) -> None:
    tokenizer = tiny_tokenizer(chat=chat)
    ids = PromptEncoder(adding_bos(tokenizer) if adds else tokenizer).encode(EXAMPLE).token_ids
    assert [i == BOS for i in ids[:2]] == [bool(leading), False]


def test_the_answer_is_encoded_as_a_continuation() -> None:
    encoder = PromptEncoder(tiny_tokenizer())
    encoded = encoder.encode(EXAMPLE)
    assert len(encoded.answer_ids) == len(" 42")
    assert encoder.encode(EXAMPLE) == encoded


def test_template_digest_changes_with_the_template() -> None:
    tokenizer = tiny_tokenizer()
    before = PromptEncoder(tokenizer).template_sha256
    tokenizer.chat_template += " "
    assert PromptEncoder(tokenizer).template_sha256 != before
