"""Needle tasks: determinism, sizing, depth, and what a prompt looks like."""

from __future__ import annotations

from dataclasses import replace

import pytest
from eval_fakes import tiny_tokenizer

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.tasks.base import ExampleRequest, to_dataset
from hf_kvpolicy.eval.tasks.haystack import noise, pydoc_prose
from hf_kvpolicy.eval.tasks.keys import key_words
from hf_kvpolicy.eval.tasks.needle import ENTRIES
from hf_kvpolicy.eval.tasks.registry import make_task

# A byte a token: lengths are in bytes here.
REQUEST = ExampleRequest(length_tokens=3000, depths=(0.0, 0.5, 1.0), num_examples=3, max_new_tokens=8, seed=1)


@pytest.fixture(scope="module")
def encoder() -> PromptEncoder:
    return PromptEncoder(tiny_tokenizer())


@pytest.mark.parametrize("name", ENTRIES)
def test_same_request_gives_same_examples_and_another_seed_others(name: str, encoder: PromptEncoder) -> None:
    first = make_task(name).examples(REQUEST, encoder)
    assert first == make_task(name).examples(REQUEST, encoder)
    other = make_task(name).examples(replace(REQUEST, seed=2), encoder)
    assert {e.example_id for e in first}.isdisjoint(e.example_id for e in other)


@pytest.mark.parametrize("name", ENTRIES)
@pytest.mark.parametrize("length", [1000, 1001, 2500, 6000])
def test_prompt_and_answer_fill_the_length_without_passing_it(name: str, length: int, encoder: PromptEncoder) -> None:
    for example in make_task(name).examples(replace(REQUEST, length_tokens=length), encoder):
        used = len(encoder.encode(example).token_ids) + REQUEST.max_new_tokens
        # One more sentence (at most 300 bytes) would not have fitted.
        assert length - 302 <= used <= length


def test_a_length_below_the_minimum_is_refused_with_the_minimum(encoder: PromptEncoder) -> None:
    task = make_task("needle_single_noise")
    minimum = task.minimum_length_tokens(REQUEST, encoder)
    with pytest.raises(ConfigError, match="Ask for a larger length"):
        task.examples(replace(REQUEST, length_tokens=100), encoder)
    # Other lengths draw other keys, so "just enough" is only exact up to the key's length.
    assert task.examples(replace(REQUEST, length_tokens=minimum + 60), encoder)


def test_depths_are_the_grid_in_order_and_the_needle_is_there(encoder: PromptEncoder) -> None:
    examples = make_task("needle_single_noise").examples(replace(REQUEST, num_examples=6), encoder)
    assert [e.coordinates["depth_ratio"] for e in examples] == [0.0, 0.5, 1.0] * 2
    for example in examples:
        body = example.context.partition("\n\n")[2]
        needle = f"{example.answer_prefix} {example.answers[0]}."
        assert body.count(needle) == 1
        assert abs(body.index(needle) / (len(body) - len(needle)) - example.coordinates["depth_ratio"]) < 0.05
        after = body.partition(needle)[2]
        assert example.coordinates["distance_tokens"] == len(after)


def test_uneven_use_of_the_depth_grid_is_refused() -> None:
    with pytest.raises(ConfigError, match="a multiple of 3"):
        replace(REQUEST, num_examples=4)


def test_multikey_has_three_other_keys_and_one_right_answer(encoder: PromptEncoder) -> None:
    for example in make_task("needle_multikey_pydoc").examples(REQUEST, encoder):
        # The instruction says "access codes"; every needle says "access code for".
        assert example.context.count("The access code for ") == 4
        assert example.context.count(example.answers[0]) == 1


def test_haystacks_never_contain_a_needle() -> None:
    for haystack in (noise(), pydoc_prose()):
        assert not any("access code" in sentence for sentence in haystack.sentences)
    assert len(pydoc_prose().sentences) > 500


def test_keys_are_distinct_and_their_source_is_named() -> None:
    import random

    words = key_words()
    assert words.source == "built-in" or words.source.startswith("wonderwords ")
    keys = words.draw(random.Random(0), 50)
    assert len(set(keys)) == 50
    assert all(key.count("-") == 1 and key.islower() for key in keys)


def test_unknown_task_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'needle_single_noise'"):
        make_task("needle_single_nois")


def test_examples_become_a_dataset(encoder: PromptEncoder) -> None:
    pytest.importorskip("datasets")
    examples = make_task("needle_single_noise").examples(REQUEST, encoder)
    table = to_dataset(examples)
    assert table["example_id"] == [e.example_id for e in examples]
    assert table["coordinate_depth_ratio"] == [0.0, 0.5, 1.0]
    assert table[0]["answers"] == list(examples[0].answers)
