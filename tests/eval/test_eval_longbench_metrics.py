"""LongBench's measures: cases counted by hand, and the faults of the published ones."""

from __future__ import annotations

import difflib
import inspect
import itertools
import random
import string
import sys
from collections.abc import Sequence

import pytest

from hf_kvpolicy.errors import ConfigError
from hf_kvpolicy.eval.metrics import rouge_l as rouge_module
from hf_kvpolicy.eval.metrics.classification import classification, classification_fixed
from hf_kvpolicy.eval.metrics.code_similarity import code_similarity, code_similarity_fixed
from hf_kvpolicy.eval.metrics.number_match import count, retrieval, retrieval_zh
from hf_kvpolicy.eval.metrics.rouge_l import rouge_l, rouge_l_zh
from hf_kvpolicy.eval.metrics.token_f1 import normalised_words, normalised_words_zh, qa_f1, qa_f1_zh
from hf_kvpolicy.eval.tasks.base import Example

pytest.importorskip("evaluate")
pytest.importorskip("jieba")
pytest.importorskip("rouge")
pytest.importorskip("rapidfuzz")

MARKS = "！？｡。＂＃（）＊＋，－／：；［＼］｛｜｝～｢｣､、〃「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏"


@pytest.mark.parametrize(
    ("prediction", "gold", "score"),
    [
        ("the White door", "a white door!", 1.0),
        ("white", "white door", 2 / 3),  # precision 1, recall 1/2
        ("white white", "white door", 0.5),  # a word counts as often as both have it
        ("", "white", 0.0),
        ("the", "a", 0.0),  # nothing is left of either
        ("red", "white", 0.0),
        ("yes, it is", "yes", 0.5),  # no special case: precision 1/3, recall 1
        ("no", "yes", 0.0),
        ("1", "1", 1.0),
        ("10", "1", 0.0),  # words, not substrings
    ],
)
def test_qa_f1(prediction: str, gold: str, score: float) -> None:
    assert qa_f1(prediction, gold) == pytest.approx(score)


def test_words_are_normalised_in_the_published_order() -> None:
    # Lower case, then punctuation, then articles: "the-end" and "a.m." become words in which no article is seen.
    assert normalised_words("The-End of An  Era, at 9 a.m.") == ["theend", "of", "era", "at", "9", "am"]
    assert normalised_words("x" + string.punctuation + "y") == ["xy"]


def test_chinese_words_lose_their_punctuation() -> None:
    assert "".join(normalised_words_zh("北京，上海。！ Hello World")) == "北京上海helloworld"
    # The published list has the closing quotation mark and not the opening one.
    assert "".join(normalised_words_zh("《书》")) == "《书"
    for mark in MARKS:
        assert normalised_words_zh(mark) == [], mark


def test_qa_f1_zh_counts_the_words_that_jieba_cuts() -> None:
    # jieba cuts the first into 北京大学, 在, 北京 and the second into 北京大学.
    assert qa_f1_zh("北京大学在北京。", "北京大学") == pytest.approx(2 * (1 / 3) * 1 / (1 / 3 + 1))
    assert qa_f1_zh("", "北京大学") == 0.0


def _lcs_f(one: str, two: str) -> float:
    """F of the longest common subsequence of two sentences without repeated words, by the textbook recurrence."""
    left, right = one.split(), two.split()
    table = [[0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i, j in itertools.product(range(len(left)), range(len(right))):
        same = left[i] == right[j]
        table[i + 1][j + 1] = table[i][j] + 1 if same else max(table[i][j + 1], table[i + 1][j])
    return 2 * table[-1][-1] / (len(left) + len(right))


def test_rouge_l_is_over_sets_of_words_with_case() -> None:
    assert rouge_l("the cat sat", "the cat sat") == pytest.approx(1.0)
    assert rouge_l("the cat", "the cat sat on") == pytest.approx(2 / 3)  # precision 1, recall 1/2
    assert rouge_l("The cat", "the cat") == pytest.approx(0.5)
    # A repeated word counts once: precision stays 1.
    assert rouge_l("cat cat cat", "cat") == pytest.approx(1.0)
    assert rouge_l("b a", "a b") == pytest.approx(0.5)


def test_rouge_l_equals_its_definition_on_random_sentences() -> None:
    rng = random.Random(0)
    for _ in range(50):
        one, two = (" ".join(rng.sample(string.ascii_lowercase[:12], size)) for size in (8, 6))
        assert rouge_l(one, two) == pytest.approx(_lcs_f(one, two), abs=1e-6)


@pytest.mark.parametrize("text", ["", ".", "..."])
def test_rouge_l_of_nothing_is_zero(text: str) -> None:
    assert rouge_l(text, "the cat") == 0.0
    assert rouge_l("the cat", text) == 0.0


def test_rouge_l_is_zero_where_the_package_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    words = " ".join(f"w{index}" for index in range(300))
    assert rouge_l(words, words) == pytest.approx(1.0)
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 200)  # as a sentence of 1,000 words meets it
    try:
        assert rouge_l(words, words) == 0.0
    finally:
        sys.setrecursionlimit(usual)

    class Broken:
        def get_scores(self, *args: object, **keywords: object) -> None:
            raise TypeError("another version")

    monkeypatch.setattr(rouge_module, "_rouge", Broken)
    with pytest.raises(TypeError):  # a package that does not work is no score of 0
        rouge_l("a", "b")


def test_rouge_l_zh_is_over_words_that_jieba_cuts() -> None:
    # 北京大学 | 在 | 北京 against 北京大学: precision 1/3, recall 1.
    assert rouge_l_zh("北京大学在北京", "北京大学") == pytest.approx(0.5)
    assert rouge_l_zh("", "北京大学") == 0.0


@pytest.mark.parametrize(
    ("prediction", "gold", "classes", "published", "fixed"),
    [
        ("Place", "Place", ["Person", "Place"], 1.0, 1.0),
        ("Place or Person", "Place", ["Person", "Place"], 0.5, 0.5),
        ("Person", "Place", ["Person", "Place"], 0.0, 0.0),
        ("", "Place", ["Person", "Place"], 0.0, 0.0),
        ("place", "Place", ["Person", "Place"], 0.0, 0.0),  # case counts
        # One part of the gold label is removed; of two in a row the second is passed over.
        ("group of people", "group of people", ["group", "group of people"], 1.0, 1.0),
        ("group of people", "group of people", ["group", "people", "group of people"], 0.5, 1.0),
        ("group of people", "group of people", ["group", "group of people", "people"], 1.0, 1.0),
    ],
)
def test_classification(prediction: str, gold: str, classes: Sequence[str], published: float, fixed: float) -> None:
    assert classification(prediction, gold, classes) == published
    assert classification_fixed(prediction, gold, classes) == fixed


@pytest.mark.parametrize(
    ("prediction", "score"),
    [("3", 1.0), ("There are 3.", 1.0), ("3 of 30", 0.5), ("13", 0.0), ("03", 0.0), ("", 0.0), ("three", 0.0)],
)
def test_count(prediction: str, score: float) -> None:
    assert count(prediction, "3") == score


def test_retrieval_takes_the_number_out_of_the_answer() -> None:
    assert retrieval("Paragraph 7", "Paragraph 7") == 1.0
    assert retrieval("It is 7", "Paragraph 7") == 1.0
    assert retrieval("Paragraph 7, not 17", "Paragraph 7") == 0.5
    assert retrieval("Paragraph 1", "Paragraph 12") == 0.0
    assert retrieval_zh("段落12和3", "段落3") == 0.5
    with pytest.raises(ConfigError, match="it names no paragraph"):
        retrieval("7", "seven")


@pytest.mark.parametrize(
    ("prediction", "published", "fixed"),
    [
        ("total += 1", 1.0, 1.0),
        ("\n\ntotal += 1\nreturn total", 1.0, 1.0),
        # Seven of ten letters in a row: 2 * 7 / 17 = 82.35 %, rounded to a whole percent.
        ("total +", 0.82, 0.82),
        ("# a comment\ntotal += 1", 1.0, 1.0),
        ("```python\ntotal += 1\n```", 1.0, 1.0),
        ("x = 1 // 2\ntotal += 1", 1.0, 1.0),
        ("# a comment\n\ntotal += 1", 0.0, 1.0),  # the published choice is the empty line
        ("# nothing else", 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_code_similarity(prediction: str, published: float, fixed: float) -> None:
    assert code_similarity(prediction, "total += 1") == published
    assert code_similarity_fixed(prediction, "total += 1") == fixed


def test_code_similarity_is_the_share_of_a_longest_common_subsequence() -> None:
    assert code_similarity("abcd", "acxd") == 0.75  # "acd": 2 * 3 / 8
    assert code_similarity("tide", "diet") == 0.5  # "de"; difflib, which fuzzywuzzy may fall back to, says 25 %
    assert difflib.SequenceMatcher(None, "tide", "diet").ratio() == 0.25


def test_the_best_of_the_answers_counts_and_few_shot_tasks_look_at_one_line() -> None:
    from hf_kvpolicy.eval.metrics.registry import available_metrics, score_answer

    example = Example(context="", question="", answer_prefix="", answers=("red", "white door"), classes=("red", "blue"))
    assert score_answer("qa_f1", "white door", example) == 1.0
    assert score_answer("qa_f1", "white door\nQuestion: ...", example) < 1.0
    assert score_answer("qa_f1_first_line", "\n\nwhite door\nQuestion: ...", example) == 1.0
    # A line that holds a blank is no empty line.
    assert score_answer("qa_f1_first_line", " \nwhite door", example) == 0.0
    assert score_answer("rouge_l_first_line", "\nred\nDialogue: red", example) == pytest.approx(1.0)
    assert score_answer("classification_first_line", "red\nblue", example) == 1.0
    numbers = Example(context="", question="", answer_prefix="", answers=("Paragraph 1 段落1",), classes=("1",))
    for metric in available_metrics():
        assert 0.0 <= score_answer(metric, "1", numbers) <= 1.0
    with pytest.raises(ConfigError, match="Did you mean 'rouge_l"):
        score_answer("rouge", "1", numbers)
