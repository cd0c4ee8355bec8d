"""The 21 tasks of LongBench v1 (Bai et al. 2023, arXiv:2308.14508): measure, answer length, and how they are asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["LENGTH_BUCKETS", "LONGBENCH_TASKS", "LongBenchSpec", "length_bucket"]

# LongBench-E reports these apart: words (characters where the text is Chinese), not tokens.
LENGTH_BUCKETS: Mapping[str, float] = {"0-4k": 4000, "4-8k": 8000, "8k+": float("inf")}


@dataclass(frozen=True, slots=True, kw_only=True)
class LongBenchSpec:
    """What LongBench says of one task.

    Attributes:
        about: kind of the task, in a few words.
        metric: name in `metrics.registry`.
        max_new_tokens: tokens of an answer.
        extended: whether LongBench-E has it too.
        chat_template: whether a chat model is asked through its template. Examples and code are continued without.
        fixed_metric: the metric without the published fault; None where there is none.
    """

    about: str
    metric: str
    max_new_tokens: int
    extended: bool = False
    chat_template: bool = True
    fixed_metric: str | None = None


def length_bucket(length: int) -> str:
    """The bucket of LongBench-E for a record's length."""
    return next(name for name, end in LENGTH_BUCKETS.items() if length < end)


def _spec(about: str, metric: str, max_new_tokens: int, *, extended: bool = False) -> LongBenchSpec:
    return LongBenchSpec(about=about, metric=metric, max_new_tokens=max_new_tokens, extended=extended)


def _continued(about: str, metric: str, max_new_tokens: int, *, extended: bool = True) -> LongBenchSpec:
    fixed = f"{metric}_fixed" if metric in ("classification_first_line", "code_sim") else None
    return LongBenchSpec(
        about=about,
        metric=metric,
        max_new_tokens=max_new_tokens,
        extended=extended,
        chat_template=False,
        fixed_metric=fixed,
    )


LONGBENCH_TASKS: Mapping[str, LongBenchSpec] = {
    "narrativeqa": _spec("questions on a story", "qa_f1", 128),
    "qasper": _spec("questions on a paper", "qa_f1", 128, extended=True),
    "multifieldqa_en": _spec("questions on a text", "qa_f1", 64, extended=True),
    "multifieldqa_zh": _spec("questions on a Chinese text", "qa_f1_zh", 64),
    "hotpotqa": _spec("questions on several passages", "qa_f1", 32, extended=True),
    "2wikimqa": _spec("questions on several passages", "qa_f1", 32, extended=True),
    "musique": _spec("questions on several passages", "qa_f1", 32),
    "dureader": _spec("questions on several Chinese passages", "rouge_l_zh", 128),
    "gov_report": _spec("summary of a report", "rouge_l", 512, extended=True),
    "qmsum": _spec("summary of a meeting, to a question", "rouge_l", 512),
    "multi_news": _spec("summary of several news", "rouge_l", 512, extended=True),
    "vcsum": _spec("summary of a Chinese meeting", "rouge_l_zh", 512),
    "trec": _continued("kind of a question, from examples", "classification_first_line", 64),
    "triviaqa": _continued("questions on a passage, from examples", "qa_f1_first_line", 32),
    "samsum": _continued("summary of a dialogue, from examples", "rouge_l_first_line", 128),
    "lsht": _continued("kind of a Chinese news, from examples", "classification_first_line", 64, extended=False),
    "passage_count": _spec("how many different paragraphs there are", "count", 32, extended=True),
    "passage_retrieval_en": _spec("which paragraph is summarised", "retrieval", 32, extended=True),
    "passage_retrieval_zh": _spec("which Chinese paragraph is summarised", "retrieval_zh", 32),
    "lcc": _continued("the next line of a file", "code_sim", 64),
    "repobench-p": _continued("the next line of a file of a repository", "code_sim", 64),
}
