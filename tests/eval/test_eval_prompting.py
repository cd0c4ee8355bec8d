"""One BOS, the answer prefix after the assistant header, and the gold answer's tokens."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from eval_fakes import tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.tasks.base import Example, Turn
from hf_kvpolicy.eval.trial import run_trial

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


def test_a_rendered_template_is_tokenised_as_it_is() -> None:
    tokenizer = adding_bos(tiny_tokenizer())
    tokenizer.chat_template = "<s><s>" + tokenizer.chat_template
    encoder = PromptEncoder(tokenizer)
    ids = tokenizer(encoder.text(EXAMPLE), add_special_tokens=False)["input_ids"]
    assert encoder.encode(EXAMPLE).token_ids == tuple(ids)


@pytest.mark.parametrize("chat", [True, False])
def test_the_question_is_a_segment_of_its_own_when_a_cache_must_not_see_it(chat: bool) -> None:
    tokenizer = tiny_tokenizer(chat=chat)
    encoder = PromptEncoder(tokenizer)
    # The prefix repeats the question, which must not be taken for it.
    example = replace(EXAMPLE, answer_prefix="What? It is")
    aware, agnostic = encoder.encode(example), encoder.encode(example, query_aware=False)
    assert aware.token_ids == agnostic.token_ids
    assert aware.segments == (aware.token_ids,)
    context, question = (tokenizer.decode(list(part)) for part in agnostic.segments)
    assert context.endswith("Text.\n\n")
    assert question.startswith("What?")
    assert question.endswith("What? It is")


def test_earlier_turns_are_segments_and_precede_the_question() -> None:
    tokenizer = tiny_tokenizer()
    turns = (Turn(user="Remember 42.", assistant="I do."), Turn(user="Wait.", assistant="I do."))
    encoded = PromptEncoder(tokenizer).encode(replace(EXAMPLE, earlier_turns=turns), query_aware=False)
    texts = [tokenizer.decode(list(part)) for part in encoded.segments]
    assert len(texts) == 4
    assert texts[0].endswith("I do.")
    assert texts[1].endswith("Wait.</s><s>assistant I do.")
    assert texts[2].endswith("Text.\n\n")
    assert texts[3].startswith("What?")


def test_a_template_that_changes_a_text_is_refused_where_the_text_ends_a_segment() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", "message['content'] | upper")
    encoder = PromptEncoder(tokenizer)
    assert encoder.encode(EXAMPLE).token_ids
    told = replace(EXAMPLE, earlier_turns=(Turn(user="Remember 42.", assistant="I do."),))
    for example, query_aware in ((EXAMPLE, False), (told, True)):
        with pytest.raises(ConfigError, match="cannot be fed in segments"):
            encoder.encode(example, query_aware=query_aware)


def test_an_example_may_refuse_the_chat_template() -> None:
    example = replace(EXAMPLE, chat_template=False, answer_prefix="", gold="43")
    encoder = PromptEncoder(tiny_tokenizer())
    assert encoder.text(example) == "Text.\n\nWhat?"
    # Nothing stands between the prompt and the answer that continues it.
    assert len(encoder.encode(example).answer_ids) == len("43")


def test_the_middle_is_cut_and_counted() -> None:
    encoder = PromptEncoder(tiny_tokenizer())
    assert encoder.cut_middle("abcdefghij", 10) == ("abcdefghij", 0)
    assert encoder.cut_middle("abcdefghij", 5) == ("abij", 6)
    assert encoder.cut_middle("abcdefghij", 1) == ("", 10)


def test_a_prompt_without_a_token_is_refused() -> None:
    example = replace(EXAMPLE, context="", joint="", question="", answer_prefix="", chat_template=False)
    encoded = PromptEncoder(tiny_tokenizer(chat=False)).encode(example)
    assert encoded.token_ids == ()
    nothing: Any = SimpleNamespace(model=None)
    with pytest.raises(ConfigError, match="has no token"):
        run_trial(nothing, nothing, example, encoded, None, metric="exact", dense=nothing, beside=encoded)
