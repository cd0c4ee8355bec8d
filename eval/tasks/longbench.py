"""LongBench v1 (Bai et al. 2023, arXiv:2308.14508): 21 tasks on given texts, and the 13 of LongBench-E.

As published: the rendered prompt is cut in its middle, six tasks go without a chat template, a dialogue's summary ends
at a line end, and each task has its measure and answer length. The measures' published faults are kept unless
`compat` is False.
Differences: without LongBench's own prompts the wording is ours; where not all records are asked for, the seed draws
    them instead of taking the first of the file.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ...errors import ConfigError
from .base import Coordinate, Example, ExampleRequest, Sizer, TaskEntry
from .longbench_data import HUB, Record, RecordFile
from .longbench_prompts import PromptTemplate, load_prompt
from .longbench_table import LONGBENCH_TASKS, LongBenchSpec, length_bucket

__all__ = ["ENTRIES", "LongBenchTask"]

_PARAMS = ("data", "prompts", "compat")


@dataclass(frozen=True, slots=True, kw_only=True)
class LongBenchTask:
    """One task of LongBench, or of LongBench-E where `extended`."""

    name: str
    task: str
    spec: LongBenchSpec
    file: RecordFile
    template: PromptTemplate
    extended: bool
    compat: bool
    depths: tuple[float, ...] = ()

    @property
    def metric(self) -> str:
        """The published measure, or the one without its fault."""
        return self.spec.metric if self.compat or self.spec.fixed_metric is None else self.spec.fixed_metric

    @property
    def max_new_tokens(self) -> int:
        """Tokens of an answer, as LongBench or the given prompts say."""
        return self.template.max_new_tokens

    @property
    def provenance(self) -> Mapping[str, str]:
        """The data file and the prompt with their digests, and whether the published faults are kept."""
        return {
            "source": "LongBench v1, arXiv:2308.14508",
            "data": self.file.file_name,
            "data_sha256": self.file.sha256(),
            "prompts": self.template.source,
            "template_sha256": self.template.sha256,
            "compat": str(self.compat).lower(),
        }

    def examples(self, request: ExampleRequest, sizer: Sizer) -> list[Example]:
        """Draw `num_examples` records, or take all where there are fewer, and render them.

        The draw depends on seed and task alone: a shorter prompt is about the same records, and more examples go on
        from fewer. `length_tokens` is LongBench's `max_length` with `compat`: it bounds the prompt, and chat template
        and answer come on top. Without `compat` it bounds all of them, as for other tasks.

        Raises:
            ConfigError: a record cannot be asked or scored, the length is too small, or a package is missing.
        """
        records = self.file.records()
        # Seeding with a string is stable across processes and Python versions, unlike hash().
        random.Random(f"{request.seed}/{self.name}").shuffle(records)
        found = [self._example(record, request, sizer) for record in records[: request.num_examples]]
        self._check_scorable(found[0])
        return found

    def _check_scorable(self, example: Example) -> None:
        """Score one right answer: a package that is missing is asked for now, and not after the first prompt."""
        from ..metrics.registry import score_answer

        score_answer(self.metric, example.gold_text, example)

    def _example(self, record: Record, request: ExampleRequest, sizer: Sizer) -> Example:
        if self.spec.metric.startswith("classification") and not record.classes:
            raise ConfigError(f"{record.where} names no classes under 'all_classes'. Correct the record.")
        head, tail = self.template.render(context=record.context, question=record.question)
        compose = partial(self._compose, record, request, head, tail)
        if self.compat:
            example = compose(*sizer.cut_middle(head + tail, request.length_tokens))
        else:
            example = self._fitting(compose, head + tail, request, sizer)
        if not f"{example.context}{example.question}".strip():
            raise _too_short(self.name, request)
        return example

    def _fitting(self, compose: Any, text: str, request: ExampleRequest, sizer: Sizer) -> Example:
        """Cut so much that prompt, template and answer fit. What was cut may tokenise longer, so it is cut again."""
        room = most = request.length_tokens - request.max_new_tokens
        while most > 1:
            example: Example = compose(*sizer.cut_middle(text, most))
            excess = len(sizer.encode(example).token_ids) - room
            if excess <= 0:
                return example
            most -= excess
        raise _too_short(self.name, request)

    def _compose(
        self, record: Record, request: ExampleRequest, head: str, tail: str, text: str, dropped_tokens: int
    ) -> Example:
        # Where the cut lies in the context the tail is what ends the text. Decoding may have dropped spaces from it:
        # then the question takes the context's last letters, rather than the context the question's first ones.
        end_of_context = len(head) if text.startswith(head) else max(len(text) - len(tail), 0)
        return Example(
            context=text[:end_of_context],
            question=text[end_of_context:],
            joint="",
            answer_prefix="",
            answers=record.answers,
            gold=self._gold(record, text),
            classes=record.classes,
            coordinates={"length_tokens": request.length_tokens, **self._coordinates(record)},
            chat_template=self.spec.chat_template,
            stop=("\n",) if self.task == "samsum" else (),
            min_new_tokens=1 if self.task == "samsum" else 0,
            dropped_tokens=dropped_tokens,
        )

    def _gold(self, record: Record, prompt: str) -> str:
        """The answer whose likelihood is measured: the first, behind a space where it ends a line of the prompt."""
        answer = next(filter(None, record.answers))
        last = prompt[-1:]
        continues = not self.spec.chat_template and last.isascii() and not last.isspace()
        return f" {answer}" if continues else answer

    def _coordinates(self, record: Record) -> dict[str, Coordinate]:
        found: dict[str, Coordinate] = {"record_id": record.record_id}
        if record.length is not None:
            found["source_length"] = record.length
        if self.extended:
            if record.length is None:
                raise ConfigError(f"{record.where} has no 'length', which LongBench-E groups by. Correct the record.")
            found["length_bucket"] = length_bucket(record.length)
        return found


def _too_short(name: str, request: ExampleRequest) -> ConfigError:
    return ConfigError(
        f"A length of {request.length_tokens} tokens leaves nothing of a prompt of task {name!r}, whose answers take "
        f"{request.max_new_tokens}. Ask for a larger length."
    )


def _make(name: str, *, task: str, extended: bool, data: Any = None, prompts: Any = None, compat: Any = True) -> Any:
    file_name = f"{task}_e.jsonl" if extended else f"{task}.jsonl"
    if data is None:
        raise ConfigError(
            f"Task {name!r} needs LongBench's records: give its parameter `data` the folder that holds {file_name}, or "
            f'the data.zip of the data set THUDM/LongBench; "{HUB}" fetches that from the Hugging Face hub.'
        )
    for key, value in (("data", data), ("prompts", prompts)):
        if not isinstance(value, str) and not (key == "prompts" and value is None):
            raise ConfigError(f"Parameter {key!r} of task {name!r} must be a path; got {value!r}.")
    if not isinstance(compat, bool):
        raise ConfigError(f"Parameter 'compat' of task {name!r} must be true or false; got {compat!r}.")
    file = RecordFile(data=data, file_name=file_name)
    file.check()
    return LongBenchTask(
        name=name,
        task=task,
        spec=LONGBENCH_TASKS[task],
        file=file,
        template=load_prompt(task, prompts),
        extended=extended,
        compat=compat,
    )


def _entry(task: str, *, extended: bool) -> TaskEntry:
    family = "LongBench-E" if extended else "LongBench"
    return TaskEntry(
        make=partial(_make, task=task, extended=extended),
        about=f"{family}: {LONGBENCH_TASKS[task].about}",
        params=_PARAMS,
    )


ENTRIES: Mapping[str, TaskEntry] = {
    **{f"longbench_{task}": _entry(task, extended=False) for task in LONGBENCH_TASKS},
    **{f"longbench_e_{task}": _entry(task, extended=True) for task, spec in LONGBENCH_TASKS.items() if spec.extended},
}
