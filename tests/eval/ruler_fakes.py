"""A tokenizer of words, and texts and files that tasks with data of the user are made from in tests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hf_kvpolicy.eval.tasks.base import Example

CONSTANTS = """
TASKS = {
    "niah": {
        "tokens_to_generate": 128,
        "template": "Some magic {type_needle_v} are here.\\n{context}\\nWhat are all the {type_needle_v} for {query}?",
        "answer_prefix": " The {type_needle_v} for {query} are",
    },
    "variable_tracking": {
        "tokens_to_generate": 30,
        "template": "Track.\\n\\n{context}\\nQuestion: variables of {query}?",
        "answer_prefix": " Answer: {num_v} variables of {query}, they are: ",
    },
    "common_words_extraction": {"tokens_to_generate": 120, "template": "L.\\n{context}\\nTop?", "answer_prefix": " A:"},
    "freq_words_extraction": {"tokens_to_generate": 50, "template": "Coded. {context}\\nTop?", "answer_prefix": " A:"},
    "qa": {"tokens_to_generate": 32, "template": "Documents.\\n\\n{context}\\n\\nQ: {query}", "answer_prefix": " A:"},
}
raise SystemExit("this file was executed")
"""
NIAH = """
needle = "One of the magic {type_needle_v} for {key} is: {value}."
if True:
    haystack = open("essays.json")
else:
    haystack = "Grass. Sky. Sun."
"""


class WordSizer:
    """A word a token, and no chat template."""

    def count(self, text: str) -> int:
        return len(text.split())

    def count_prompt(self, example: Example) -> int:
        turns = [part for turn in example.earlier_turns for part in (turn.user, turn.assistant)]
        parts = [*turns, example.context, example.question, example.answer_prefix]
        return sum(self.count(part) for part in parts)

    def cut_middle(self, text: str, max_tokens: int) -> tuple[str, int]:
        raise NotImplementedError

    def encode(self, example: Example) -> Any:
        ids = range(self.count_prompt(example))
        return SimpleNamespace(token_ids=ids, answer_ids=range(self.count(example.gold_text)))


def write_checkout(root: Path) -> Path:
    """A folder laid out as a RULER checkout; importing any file of it would fail."""
    folder = root / "scripts" / "data" / "synthetic"
    folder.mkdir(parents=True)
    (folder / "constants.py").write_text(CONSTANTS)
    (folder / "niah.py").write_text(NIAH)
    return root


def write_text(path: Path) -> Path:
    """Sixty different sentences in paragraphs."""
    sentences = [f"Sentence {number} tells of the {number}th day on the road to the old town." for number in range(60)]
    path.write_text("\n\n".join(" ".join(sentences[start : start + 6]) for start in range(0, 60, 6)))
    return path


def write_squad(path: Path) -> Path:
    """Six articles of three paragraphs; one question each, and one that cannot be answered."""

    def paragraph(article: int, number: int) -> dict[str, Any]:
        text = f"Paragraph {number} of article {article} says that its mark is M{article}{number}."
        answers = [{"text": f"M{article}{number}"}, {"text": f"its mark is M{article}{number}"}]
        good = {"question": f"What is the mark of {article}.{number}?", "answers": answers, "is_impossible": False}
        return {"context": text, "qas": [good, {"question": "?", "answers": [], "is_impossible": True}]}

    articles = [{"title": str(a), "paragraphs": [paragraph(a, n) for n in range(3)]} for a in range(6)]
    path.write_text(json.dumps({"data": articles}))
    return path


def write_hotpotqa(path: Path) -> Path:
    """Eight questions with two documents each."""
    rows = [
        {
            "question": f"Which colour has {number}?",
            "answer": f"colour {number}",
            "context": [[f"Title {number}{part}", [f"Text {part} of {number}.", " More."]] for part in "ab"],
        }
        for number in range(8)
    ]
    path.write_text(json.dumps(rows))
    return path
