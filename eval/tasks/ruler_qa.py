"""RULER's question answering (Hsieh et al. 2024, arXiv:2404.06654) on SQuAD and HotpotQA files of the user.

As published, documents of the same article fill the context before others do, and all documents of a HotpotQA question
are in it.
Deviations: the document that answers a SQuAD question lies at the depths of a fixed grid; questions are taken in an
    order by chance; the wording is ours unless `templates` names a RULER checkout.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from .base import DEPTH_GRID, Example, ExampleRequest, Sizer, TaskEntry
from .ruler_text import TEMPLATE_PARAM, RulerWording, wording_of
from .sizing import SizedTask

__all__ = ["ENTRIES", "RulerQATask"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    text: str
    answers: tuple[str, ...]
    own: tuple[int, ...]  # documents that must be there
    near: tuple[int, ...]  # documents of the same article


@dataclass(frozen=True, slots=True, kw_only=True)
class _Corpus:
    digest: str
    documents: tuple[str, ...]
    questions: tuple[_Question, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Draw:
    question: _Question
    others: tuple[int, ...]
    depth: float | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RulerQATask(SizedTask):
    """A question about one or several of many documents."""

    data: str
    read: Callable[[Any], tuple[list[str], list[_Question]]]
    wording: RulerWording
    metric: str = "string_match_part"
    max_new_tokens: int = 32

    @property
    def provenance(self) -> Mapping[str, str]:
        """Name and digest of the file, and whose wording it is."""
        return {"data": Path(self.data).name, "data_sha256": self._corpus().digest, **self.wording.provenance}

    def draw(self, rng: random.Random, request: ExampleRequest, index: int, sizer: Sizer) -> _Draw:
        """A question, and the order in which other documents come in."""
        corpus = self._corpus()
        order = random.Random(f"{request.seed}/{self.name}").sample(corpus.questions, len(corpus.questions))
        question = order[index % len(order)]
        rest = set(range(len(corpus.documents))).difference(question.own, question.near)
        others = rng.sample(question.near, len(question.near)) + rng.sample(sorted(rest), len(rest))
        depth = request.depths[index % len(request.depths)] if request.depths else None
        return _Draw(question=question, others=tuple(others), depth=depth, seed=rng.getrandbits(32))

    def unit_bounds(self, draw: _Draw) -> tuple[int, int | None]:
        """Documents beyond the question's own."""
        return 0, len(draw.others)

    def compose(self, draw: _Draw, units: int, request: ExampleRequest) -> Example:
        """Numbered documents."""
        documents, chosen = self._corpus().documents, list(draw.others[:units])
        if draw.depth is None:
            chosen += draw.question.own
            random.Random(draw.seed).shuffle(chosen)
        else:
            at = round(draw.depth * units)
            chosen[at:at] = draw.question.own
        text = "\n\n".join(f"Document {number}:\n{documents[i]}" for number, i in enumerate(chosen, start=1))
        return Example(
            **self.wording.templates["qa"].parts(text, query=draw.question.text),
            answers=draw.question.answers,
            coordinates={
                "length_tokens": request.length_tokens,
                **({} if draw.depth is None else {"depth_ratio": draw.depth}),
            },
        )

    def evidence(self, draw: _Draw) -> str | None:
        """The document that answers, where there is one."""
        return None if draw.depth is None else self._corpus().documents[draw.question.own[0]]

    def _corpus(self) -> _Corpus:
        return _read(self.data, self.read)


@lru_cache(maxsize=2)
def _read(path: str, read: Callable[[Any], tuple[list[str], list[_Question]]]) -> _Corpus:
    try:
        content = Path(path).read_bytes()
        documents, questions = read(json.loads(content))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"data: {path!r} cannot be read as the questions of this task: {type(error).__name__}: {error}. Give a "
            "SQuAD file for ruler_qa_1, a HotpotQA file (distractor setting) for ruler_qa_2."
        ) from error
    if not questions:
        raise ConfigError(f"data: {path!r} holds no question that has an answer. Give the development set.")
    return _Corpus(digest=sha256(content).hexdigest(), documents=tuple(documents), questions=tuple(questions))


def _read_squad(content: Any) -> tuple[list[str], list[_Question]]:
    """Answerable questions; the documents are the paragraphs."""
    articles = [[paragraph["context"] for paragraph in article["paragraphs"]] for article in content["data"]]
    documents = list(dict.fromkeys(text for article in articles for text in article))
    places = {text: i for i, text in enumerate(documents)}
    questions = []
    for article, texts in zip(content["data"], articles, strict=True):
        for paragraph in article["paragraphs"]:
            own = places[paragraph["context"]]
            near = tuple(dict.fromkeys(places[text] for text in texts if places[text] != own))
            for asked in paragraph["qas"]:
                if not asked.get("is_impossible") and asked["answers"]:
                    answers = tuple(dict.fromkeys(answer["text"] for answer in asked["answers"]))
                    questions.append(_Question(text=asked["question"], answers=answers, own=(own,), near=near))
    return documents, questions


def _read_hotpotqa(content: Any) -> tuple[list[str], list[_Question]]:
    """Every question with its supporting and its misleading documents."""
    texts = [[f"{title}\n{''.join(sentences)}" for title, sentences in asked["context"]] for asked in content]
    documents = list(dict.fromkeys(text for group in texts for text in group))
    places = {text: i for i, text in enumerate(documents)}
    questions = [
        _Question(
            text=asked["question"],
            answers=(asked["answer"],),
            own=tuple(dict.fromkeys(places[text] for text in group)),
            near=(),
        )
        for asked, group in zip(content, texts, strict=True)
    ]
    return documents, questions


def _make(
    name: str,
    *,
    read: Callable[[Any], tuple[list[str], list[_Question]]],
    what: str,
    depths: tuple[float, ...],
    data: str | None = None,
    templates: str | None = None,
) -> RulerQATask:
    if data is None or not Path(data).is_file():
        raise ConfigError(
            f"Task {name!r} asks the questions of {what}, which is not part of this package; data is {data!r}. Give "
            "the path of its JSON file in the parameter data."
        )
    return RulerQATask(name=name, data=str(data), read=read, wording=wording_of(templates), depths=depths)


ENTRIES: Mapping[str, TaskEntry] = {
    "ruler_qa_1": TaskEntry(
        make=partial(_make, read=_read_squad, what="SQuAD 2.0 (development set)", depths=DEPTH_GRID),
        about="a SQuAD question about one of many paragraphs (a file of yours)",
        params=("data", TEMPLATE_PARAM),
    ),
    "ruler_qa_2": TaskEntry(
        make=partial(_make, read=_read_hotpotqa, what="HotpotQA (development set, distractor setting)", depths=()),
        about="a HotpotQA question about several of many documents (a file of yours)",
        params=("data", TEMPLATE_PARAM),
    ),
}
