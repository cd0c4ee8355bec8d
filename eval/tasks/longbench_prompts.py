"""Prompts of the LongBench tasks: LongBench's own from a checkout, or ours, which ask for the same in other words.

Scores of two wordings are two measures. A run's record says which one it used, with its digest.
"""

from __future__ import annotations

import hashlib
import json
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .longbench_table import LONGBENCH_TASKS

__all__ = ["OURS", "PromptTemplate", "load_prompt"]

_FIELDS = ("context", "input")
_PROMPT_FILE, _LENGTH_FILE = "dataset2prompt.json", "dataset2maxlen.json"
# The benchmark's repository has moved its files once.
_PLACES = ("", "config", "LongBench/config")

_PASSAGES = (
    "Several passages follow, and after them a question that they answer.\n\n{context}\n\nUse the passages above. "
    "Reply with the answer alone.\n\nQuestion: {input}\nAnswer:"
)
OURS: Mapping[str, str] = {
    "narrativeqa": (
        "Here is a story, taken from a book or from a film script.\n\n{context}\n\nReply to a question about this "
        "story in as few words as will do, without an explanation.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "qasper": (
        "Here is a scientific paper.\n\n{context}\n\nReply to a question about this paper with a phrase or one "
        'sentence, without an explanation. Reply "yes" or "no" where that is what is asked, and "unanswerable" where '
        "the paper does not say.\n\nQuestion: {input}\n\nAnswer:"
    ),
    "multifieldqa_en": (
        "Here is a text.\n\n{context}\n\nReply to a question about this text, with the answer and no other word.\n\n"
        "Question: {input}\nAnswer:"
    ),
    "multifieldqa_zh": (
        "下面是一篇文章。\n\n{context}\n\n根据这篇文章用中文作答，除答案外不写别的内容。\n\n问题：{input}\n答案："
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": "下面是几篇文章。\n\n{context}\n\n根据这些文章作答。\n\n问题：{input}\n答案：",
    "gov_report": (
        "Here is the report of a public authority.\n\n{context}\n\nSummarise this report on one page.\n\nSummary:"
    ),
    "qmsum": (
        "Here is what was said in a meeting.\n\n{context}\n\nReply in one or a few sentences to a question or a "
        "request about this meeting.\n\nQuery: {input}\nAnswer:"
    ),
    "multi_news": "Here are some news articles.\n\n{context}\n\nSummarise all of them on one page.\n\nSummary:",
    "vcsum": "下面是一次会议的发言记录。\n\n{context}\n\n请概括这次会议说了什么。\n\n总结：",
    "trec": "Each question below has a type. Find the type of the last one.\n\n{context}\n{input}",
    "triviaqa": (
        "Each question below is about the passage before it and has a short answer. Answer the last one.\n\n"
        "{context}\n\n{input}"
    ),
    "samsum": (
        "Each dialogue below has a summary of a few short sentences. Summarise the last one.\n\n{context}\n\n{input}"
    ),
    "lsht": "下面每条新闻都有一个类别。请写出最后一条新闻的类别。\n\n{context}\n{input}",
    "passage_count": (
        "Below are paragraphs, and some of them occur more than once.\n\n{context}\n\nHow many different paragraphs "
        "are there? Count one that occurs several times once, and reply with a number only, such as 4.\n\n"
        "The number of different paragraphs is: "
    ),
    "passage_retrieval_en": (
        "Below are 30 numbered paragraphs.\n\n{context}\n\nThis summarises one of them:\n\n{input}\n\nName the one "
        'that is summarised in the form "Paragraph 4".\n\nIt is: '
    ),
    "passage_retrieval_zh": (
        "下面是若干个编了号的段落。\n\n{context}\n\n以下摘要概括了其中一个段落：\n\n{input}\n\n"
        "请写出是哪一个段落，写成“段落4”的样子。\n\n它是："
    ),
    "lcc": "Write the line that continues this code.\n{context}The next line is:\n",
    "repobench-p": "Write the line that continues this code.\n{context}{input}The next line is:\n",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTemplate:
    """A text with the fields {context} and {input}, where it comes from, and how long an answer may be."""

    text: str
    source: str
    max_new_tokens: int

    @property
    def sha256(self) -> str:
        """Digest of the text."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def render(self, *, context: str, question: str) -> tuple[str, str]:
        """The prompt in two pieces: up to the end of the (last) context, and what follows it."""
        head = whole = ""
        for literal, name in _pieces(self.text):
            whole += literal
            if name is not None:
                whole += context if name == "context" else question
            if name == "context":
                head = whole
        return head, whole[len(head) :]


def load_prompt(task: str, place: str | None) -> PromptTemplate:
    """The prompt of a LongBench task: ours, or the one in a folder that holds LongBench's two files of them.

    Args:
        task: such as "qasper".
        place: a folder with `dataset2prompt.json` and `dataset2maxlen.json`, or a checkout of LongBench; None for ours.

    Raises:
        ConfigError: the files are not there, do not name the task, or what they say is no template or no length.
    """
    if place is None:
        return PromptTemplate(text=OURS[task], source="ours", max_new_tokens=LONGBENCH_TASKS[task].max_new_tokens)
    text, text_file = _entry(place, _PROMPT_FILE, task)
    max_new_tokens, length_file = _entry(place, _LENGTH_FILE, task)
    if not isinstance(text, str):
        raise ConfigError(f"{text_file} has no text for {task!r} but {text!r}. Correct the file.")
    _check(text, f"The prompt of {task!r} in {text_file}")
    if isinstance(max_new_tokens, bool) or not isinstance(max_new_tokens, int) or max_new_tokens < 1:
        raise ConfigError(f"{length_file} has no number of tokens for {task!r} but {max_new_tokens!r}. Correct it.")
    return PromptTemplate(text=text, source=_PROMPT_FILE, max_new_tokens=max_new_tokens)


def _entry(place: str, file_name: str, task: str) -> tuple[Any, Path]:
    folder = Path(place).expanduser()
    found = [path for path in (folder / part / file_name for part in _PLACES) if path.is_file()]
    if not found:
        raise ConfigError(
            f"There is no {file_name} in {place!r}, nor in its folders {' and '.join(_PLACES[1:])}. Give the folder "
            "`config` of LongBench's repository, or leave `prompts` out to use the built-in wording."
        )
    try:
        entries = json.loads(found[0].read_text(encoding="utf-8"))
    except ValueError as error:  # neither JSON nor UTF-8
        raise ConfigError(f"{found[0]} cannot be read as JSON: {error}. Fetch the file again.") from error
    if not isinstance(entries, dict) or task not in entries:
        raise ConfigError(f"{found[0]} has no entry {task!r}. Give LongBench's own file, with all of its tasks.")
    return entries[task], found[0]


def _check(text: str, what: str) -> None:
    try:
        names = [name for _, name in _pieces(text) if name is not None]
    except ValueError as error:
        raise ConfigError(f"{what} is no template: {error}. Write a brace that is no field twice.") from error
    unknown = [name for name in names if name not in _FIELDS]
    if unknown:
        raise ConfigError(f"{what} has the unknown field {{{unknown[0]}}}; there are {{context}} and {{input}}.")
    if "context" not in names:
        raise ConfigError(f"{what} has no field {{context}}, so the text would not be in the prompt. Add it.")


def _pieces(text: str) -> list[tuple[str, str | None]]:
    """Literal text and the field behind it; a conversion or format counts as part of the field's name."""
    found = []
    for literal, name, spec, conversion in string.Formatter().parse(text):
        tail = (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
        found.append((literal, None if name is None else f"{name}{tail}"))
    return found
