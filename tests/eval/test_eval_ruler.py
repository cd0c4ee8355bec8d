"""RULER's tasks: published parameters, counts of what is hidden, wording from a checkout, and scores by hand."""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ruler_fakes import WordSizer, write_checkout, write_hotpotqa, write_squad, write_text

pytest.importorskip("evaluate")
pytest.importorskip("wonderwords")

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.metrics.exact import copied_words, starts_with
from hf_kvpolicy.eval.metrics.needle_match import any_match, needle_match
from hf_kvpolicy.eval.metrics.registry import score_answer
from hf_kvpolicy.eval.tasks.base import Example, ExampleRequest
from hf_kvpolicy.eval.tasks.registry import make_task
from hf_kvpolicy.eval.tasks.ruler_niah import RULER_DEPTHS, spread_depths
from hf_kvpolicy.eval.tasks.ruler_text import OURS, wording_of
from hf_kvpolicy.eval.tasks.ruler_words import zipf_counts

SIZER = WordSizer()
UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"


def examples_of(name: str, *, length: int = 900, count: int = 5, **params: Any) -> list[Example]:
    task = make_task(name, params)
    request = ExampleRequest(
        length_tokens=length, depths=task.depths, num_examples=count, max_new_tokens=task.max_new_tokens, seed=3
    )
    return task.examples(request, SIZER)


@pytest.mark.parametrize(
    ("name", "tokens", "metric"),
    [
        *((f"ruler_niah_{kind}", 128, "string_match_all") for kind in ("single_1", "multikey_2", "multikey_3")),
        *((f"ruler_niah_{kind}_pydoc", 128, "string_match_all") for kind in ("single_2", "multivalue", "multiquery")),
        ("ruler_vt", 30, "string_match_all"),
        ("ruler_cwe", 120, "string_match_all"),
        ("ruler_fwe", 50, "string_match_all"),
    ],
)
def test_tokens_to_generate_and_measures_are_the_published_ones(name: str, tokens: int, metric: str) -> None:
    task = make_task(name)
    assert (task.max_new_tokens, task.metric) == (tokens, metric)


@pytest.mark.parametrize(
    ("name", "needles", "answers", "value"),
    [
        ("ruler_niah_single_1", 1, 1, r"\d{7}"),
        ("ruler_niah_single_2_pydoc", 1, 1, r"\d{7}"),
        ("ruler_niah_single_3_pydoc", 1, 1, UUID),
        ("ruler_niah_multikey_1_pydoc", 4, 1, r"\d{7}"),
        ("ruler_niah_multivalue_pydoc", 4, 4, r"\d{7}"),
        ("ruler_niah_multiquery_pydoc", 4, 4, r"\d{7}"),
        ("ruler_niah_multikey_2", None, 1, r"\d{7}"),
        ("ruler_niah_multikey_3", None, 1, UUID),
    ],
)
def test_needles_are_as_many_as_the_task_says(name: str, needles: int | None, answers: int, value: str) -> None:
    for example in examples_of(name):
        found = example.context.count("Among the registered ")
        lines = example.context.partition("\n\n")[2].split("\n")
        # A text of needles has nothing else in it.
        assert found == (len(lines) if needles is None else needles)
        assert len(set(example.answers)) == answers
        assert all(re.fullmatch(value, answer) and example.context.count(answer) == 1 for answer in example.answers)
        assert example.gold == ", ".join(example.answers)


def test_a_question_about_one_value_is_in_the_singular() -> None:
    one, four = examples_of("ruler_niah_single_1", count=5)[0], examples_of("ruler_niah_multivalue_pydoc")[0]
    assert one.context.startswith("A registered number is mentioned")
    assert one.question.startswith("What is the registered number of ")
    assert four.context.startswith("Some registered numbers are mentioned")
    assert re.fullmatch(r"The registered numbers of [a-z]+-[a-z]+ are", four.answer_prefix)


def test_four_keys_are_asked_for_in_an_order_of_their_own() -> None:
    orders = set()
    for example in examples_of("ruler_niah_multiquery_pydoc", count=8):
        asked = re.findall(r"[a-z]+-[a-z]+", example.question)
        assert len(asked) == 4
        pairs = dict(re.findall(r"numbers of (\S+) is (\d+)\.", example.context))
        assert tuple(pairs[key] for key in asked) == example.answers
        orders.add(tuple(sorted(asked, key=example.context.index)) == tuple(asked))
    assert False in orders


def test_several_needles_are_spread_over_rulers_depths() -> None:
    import random

    assert len(RULER_DEPTHS) == 40
    assert (RULER_DEPTHS[0], RULER_DEPTHS[1], RULER_DEPTHS[-1]) == (0.0, 0.03, 1.0)
    for seed in range(20):
        depths = spread_depths(random.Random(seed), 4)
        assert [math.floor(RULER_DEPTHS.index(depth) / 10) for depth in depths] == [0, 1, 2, 3]


def test_variable_tracking_has_a_chain_of_four_hops_behind_a_worked_example() -> None:
    for example in examples_of("ruler_vt"):
        worked, _, text = example.context.rpartition("Variables get their values")
        value = example.question.split()[-5]
        chain = [re.search(rf"^VAR ([A-Z]{{5}}) = {value}$", text, re.M)]
        for _ in range(4):
            assert chain[-1] is not None
            chain.append(re.search(rf"^VAR ([A-Z]{{5}}) = VAR {chain[-1][1]}$", text, re.M))
        assert tuple(step[1] for step in chain if step) == example.answers
        places = [step.start() for step in chain if step]
        assert places == sorted(places)
        assert len(re.findall(r"^VAR ", text, re.M)) == 5
        names = re.findall(r"^VAR ([A-Z]{3}) = ", worked, re.M)
        assert worked.rstrip().endswith(" ".join(names))
        assert len(names) == 5


@pytest.mark.parametrize(("length", "common", "uncommon", "worked"), [(900, 6, 1, (3, 1)), (4096, 30, 3, (10, 3))])
def test_common_words_occur_as_often_as_published(
    length: int, common: int, uncommon: int, worked: tuple[int, int]
) -> None:
    (example,) = examples_of("ruler_cwe", length=length, count=1)
    shown, text = (part for part in example.context.split("The numbered list below")[1:])
    counts = Counter(re.findall(r"\d+\. ([a-z]+)", text))
    assert {counts[word] for word in example.answers} == {common}
    assert len(example.answers) == 10
    assert {count for word, count in counts.items() if word not in example.answers} == {uncommon}
    listed, _, answer = shown.partition("Answer:")
    solved = re.findall(r"\d+\. ([a-z]+)", answer)
    assert not {*solved} & {*example.answers}
    assert Counter(Counter(re.findall(r"\d+\. ([a-z]+)", listed)).values()) == {
        worked[0]: 10,
        worked[1]: 10 if length < 4096 else 30,
    }


def test_coded_words_fall_with_the_square_of_their_rank() -> None:
    # 100 / (rank ** 2 * 1.6449...): 60.8, 15.2, 6.8, 3.8, 2.4.
    assert zipf_counts(100, 5) == [60, 15, 6, 3, 2]
    for example in examples_of("ruler_fwe"):
        words = Counter(example.context.partition("each of them. ")[2].split())
        ranked = [word for word, _ in words.most_common(5)]
        assert ranked[0] == "..."
        assert tuple(ranked[1:4]) == example.answers
        assert words[ranked[3]] > words[ranked[4]]
        assert all(re.fullmatch("[a-z]{6}", word) for word in example.answers)


def test_squad_documents_hold_the_answer_and_the_article_comes_first(tmp_path: Path) -> None:
    data = str(write_squad(tmp_path / "squad.json"))
    for example in examples_of("ruler_qa_1", length=130, data=data):
        article, number = re.findall(r"(\d)\.(\d)", example.question)[0]
        assert example.answers[0] == f"M{article}{number}"
        assert example.context.count(f"Paragraph {number} of article {article} ") == 1
        others = set(re.findall(r"of article (\d)", example.context)) - {article}
        same = len(re.findall(f"of article {article} ", example.context))
        assert same == 3 or not others


def test_hotpotqa_documents_of_a_question_are_all_there(tmp_path: Path) -> None:
    data = str(write_hotpotqa(tmp_path / "hotpot.json"))
    for example in examples_of("ruler_qa_2", length=140, data=data):
        number = example.answers[0].split()[-1]
        assert all(f"Title {number}{part}\nText {part} of {number}. More." in example.context for part in "ab")


def test_a_file_of_other_questions_is_refused(tmp_path: Path) -> None:
    data = str(write_squad(tmp_path / "squad.json"))
    with pytest.raises(ConfigError, match="HotpotQA file"):
        examples_of("ruler_qa_2", data=data)


def test_wording_is_read_from_a_checkout_without_running_it(tmp_path: Path) -> None:
    root = str(write_checkout(tmp_path / "RULER"))
    wording = wording_of(root)
    assert wording.noise_line == "Grass. Sky. Sun."
    assert wording.provenance["templates"] == "RULER checkout"
    assert wording.provenance["templates_sha256"] != OURS.provenance["templates_sha256"]
    example = examples_of("ruler_niah_single_1", templates=root)[0]
    assert example.context.startswith("A magic number is here.\nGrass. Sky. Sun.\n")
    assert "One of the magic numbers for " in example.context
    key = example.question.split()[-1].rstrip("?")
    assert example.question == f"What is the number for {key}?"
    # The space that joins a prefix to one string of a template is not the answer's.
    assert example.answer_prefix == f"The number for {key} is"
    tracked = examples_of("ruler_vt", templates=root)[0]
    assert tracked.answer_prefix.endswith("they are: ")


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("variables of {query}?", "variables of {quary}?", "has the field 'quary'"),
        ("Coded. {context}", "Coded.", "lacks the field 'context'"),
        ("for {query} are", "for {context} are", "the answer prefix of niah has the field 'context'"),
        ("Q: {query}", "Q: {query", "expected '}'"),
        ("Q: {query}", "Q: {}", "has the field ''"),
        ("is: {value}", "is: it", "the needle lacks the field 'value'"),
    ],
)
def test_a_template_that_cannot_be_filled_in_is_refused_before_a_model(
    before: str, after: str, message: str, tmp_path: Path
) -> None:
    root = write_checkout(tmp_path / "RULER")
    for file in (root / "scripts" / "data" / "synthetic").iterdir():
        file.write_text(file.read_text().replace(before, after))
    with pytest.raises(ConfigError) as caught:
        wording_of(str(root))
    assert message in str(caught.value)


def test_a_folder_that_is_no_checkout_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave the parameter out"):
        make_task("ruler_vt", {"templates": str(tmp_path)})


def test_a_text_of_the_user_carries_rulers_name_and_its_digest(tmp_path: Path) -> None:
    path = write_text(tmp_path / "essays.txt")
    task = make_task("ruler_niah_single_2", {"haystack": str(path)})
    sentences = path.read_text().replace("\n\n", " ").replace(". ", ".\n")
    assert task.provenance["haystack_sha256"] == hashlib.sha256(sentences.encode()).hexdigest()
    (tmp_path / "essays.json").write_text('{"text": ' + repr(path.read_text()).replace("'", '"') + "}")
    again = make_task("ruler_niah_single_2", {"haystack": str(tmp_path / "essays.json")})
    assert again.provenance["haystack_sha256"] == task.provenance["haystack_sha256"]


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("to be or not", "to be or not", 1.0),
        ("  to be\nor else", "to be or not", 0.75 - 0.0),
        ("to Be or not", "to be or not", 0.25),
        ("", "to be", 0.0),
        ("to be or not to be", "to be", 1.0),
    ],
)
def test_copied_words_end_at_the_first_error(prediction: str, gold: str, score: float) -> None:
    assert copied_words(prediction, gold) == score


@pytest.mark.parametrize(
    ("prediction", "answer", "score"),
    [
        (" 174.", "174", 1.0),
        ("174,5", "174", 0.0),
        ("174.5 km", "174", 0.0),
        ("1745", "174", 0.0),
        ("17", "174", 0.0),
        ("Velora, of course", "velora", 1.0),
        ("veloras", "velora", 0.0),
        ("It is 174", "174", 0.0),
    ],
)
def test_an_answer_starts_with_what_is_asked_for(prediction: str, answer: str, score: float) -> None:
    assert starts_with(prediction, answer) == score


def test_rulers_measures_are_all_parts_and_any_wording() -> None:
    answers = ("Denver", "the Broncos", "Broncos", "1999")
    text = "\x01 the broncos\x1f"
    assert needle_match(text, answers) == 0.5
    assert any_match(text, answers) == 1.0
    assert any_match("none", answers) == 0.0
    example = Example(context="c", question="q", answer_prefix="", answers=answers)
    assert score_answer("string_match_all", text, example) == 0.5
    assert score_answer("string_match_part", text, example) == 1.0
