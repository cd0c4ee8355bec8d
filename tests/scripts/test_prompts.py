"""The needle prompt: its length, where the needle lies, and that its answer can be scored by token."""

from __future__ import annotations

import pytest
from script_lib.prompts import filler_ids, haystack_sentences, needle_prompt
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Splits at spaces and punctuation; digits and unknown words are single tokens."""
    words = {word for sentence in haystack_sentences() for word in sentence.split()}
    vocabulary = {"<unk>": 0, **{word: i + 1 for i, word in enumerate(sorted(words))}}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


@pytest.mark.parametrize("tokens", [400, 2000])
def test_prompt_is_about_as_long_as_asked(tokenizer: PreTrainedTokenizerFast, tokens: int) -> None:
    prompt = needle_prompt(tokenizer, tokens)
    assert 0.8 * tokens <= len(prompt.input_ids) <= tokens


@pytest.mark.parametrize("depth", [0.1, 0.3, 0.8])
def test_needle_lies_at_its_depth(tokenizer: PreTrainedTokenizerFast, depth: float) -> None:
    prompt = needle_prompt(tokenizer, 2000, depth=depth)
    begin, end = prompt.needle_span
    assert 0 < end - begin < 20
    assert begin / len(prompt.input_ids) == pytest.approx(depth, abs=0.06)


def test_gold_answer_follows_the_prompt(tokenizer: PreTrainedTokenizerFast) -> None:
    prompt = needle_prompt(tokenizer, 400, value="12345")
    assert prompt.value == "12345"
    assert len(prompt.gold_ids) == 1


def test_filler_has_exactly_the_tokens_asked_for(tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(filler_ids(tokenizer, 1000)) == 1000


def test_a_prompt_longer_than_the_text_says_so(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(ValueError, match="Ask for fewer tokens"):
        needle_prompt(tokenizer, 10**7)


def test_haystack_is_prose_without_the_needle() -> None:
    sentences = haystack_sentences()
    assert len(sentences) > 1000
    assert not any("magic number" in sentence for sentence in sentences)
