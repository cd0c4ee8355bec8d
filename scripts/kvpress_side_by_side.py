"""Policies beside the presses of kvpress on the same examples: scores, answers, rows kept and bytes freed.

kvpress_peer.py runs its half in kvpress's own environment. Every context is compressed before its question is known.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeAlias

import torch
import transformers
from kvpress_lib.contenders import FULL, Contender, contenders
from kvpress_lib.report import cell_of, report_lines
from script_lib.loading import use_threads
from script_lib.needle_rows import kept_mask

import hf_kvpolicy as kv
from hf_kvpolicy.eval.dense_prompts import DensePrompts
from hf_kvpolicy.eval.engine import measure
from hf_kvpolicy.eval.generation import end_of_text_ids, fork, greedy_decode, prefill, score_answer
from hf_kvpolicy.eval.metrics import registry as metrics
from hf_kvpolicy.eval.model_loading import SMOLLM2_NAME, LoadedModel, load_model
from hf_kvpolicy.eval.prompting import EncodedPrompt, PromptEncoder
from hf_kvpolicy.eval.tasks.base import Example, ExampleRequest, Task
from hf_kvpolicy.eval.tasks.registry import make_task

MAX_NEW_TOKENS = 12
PEER = Path(__file__).with_name("kvpress_peer.py")

# By the example's id.
Prompts: TypeAlias = "dict[str, EncodedPrompt]"


def examples_of(task: Task, encoder: PromptEncoder, tokens: int, count: int) -> list[Example]:
    request = ExampleRequest(
        length_tokens=tokens, depths=task.depths, num_examples=count, max_new_tokens=MAX_NEW_TOKENS, seed=0
    )
    return task.examples(request, encoder)


def context_and_question(encoded: EncodedPrompt) -> tuple[EncodedPrompt, tuple[int, ...]]:
    """The context as a prompt of its own, and what follows it."""
    context, question = encoded.segments
    return replace(encoded, token_ids=context, segment_ends=(len(context),)), question


def trial_of(
    loaded: LoadedModel, encoded: EncodedPrompt, dense: DensePrompts, contender: Contender, stop_ids: frozenset[int]
) -> dict[str, Any]:
    """Compress the context, read what the cache holds, then ask."""
    context, question = context_and_question(encoded)
    cache = kv.make_cache(contender.policy, loaded.model, budget=contender.rows, **contender.options)
    compressed = dense.prefill(context, cache)
    use = measure(compressed.cache)
    held = [compressed.cache.positions(layer) for layer in compressed.cache.policy_layers]
    asked = prefill(loaded.model, [question], compressed.cache, next_logits=compressed.next_logits)
    score = score_answer(loaded.model, fork(asked), encoded.answer_ids)
    answer = greedy_decode(loaded.model, asked, MAX_NEW_TOKENS, stop_ids)
    return {
        "contender": contender.key,
        "answer_ids": list(answer.token_ids),
        "answer_nll": score.nll_per_token,
        "held_bytes": use.measured_bytes,
        "payload_bytes": use.payload_bytes,
        "kept_LHN": kept_mask(held, len(context.token_ids)),
    }


def write_examples(folder: Path, loaded: LoadedModel, prompts: Prompts, arguments: argparse.Namespace) -> None:
    """What the peer needs: token ids, and how to run them."""
    examples = [
        {"id": name, "context_ids": p.segments[0], "question_ids": p.segments[1], "answer_ids": p.answer_ids}
        for name, p in prompts.items()
    ]
    run = {
        "source": loaded.source,
        "threads": torch.get_num_threads(),
        "budgets": arguments.budgets,
        "max_new_tokens": MAX_NEW_TOKENS,
        "stop_ids": sorted(end_of_text_ids(loaded.model, loaded.tokenizer)),
        "examples": examples,
    }
    (folder / "examples.json").write_text(json.dumps(run))


def our_trials(loaded: LoadedModel, prompts: Prompts, budgets: list[int]) -> list[dict[str, Any]]:
    """Every example under every policy; what of a prompt is the same for all of them runs once."""
    stop_ids = end_of_text_ids(loaded.model, loaded.tokenizer)
    trials = []
    for name, encoded in prompts.items():
        dense = DensePrompts(loaded.model)
        for contender in contenders(budgets):
            trials.append({"example": name, **trial_of(loaded, encoded, dense, contender, stop_ids)})
        print(f"hf_kvpolicy: {name}", file=sys.stderr, flush=True)
    return trials


def both_halves(
    loaded: LoadedModel, prompts: Prompts, arguments: argparse.Namespace, folder: Path
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Our trials and what the peer left, run at the same time: nothing here is timed.

    Raises:
        RuntimeError: the peer failed; its own message is on stderr.
    """
    write_examples(folder, loaded, prompts, arguments)
    with subprocess.Popen([arguments.peer, str(PEER), str(folder)]) as peer:
        try:
            ours = our_trials(loaded, prompts, arguments.budgets)
        except BaseException:
            peer.kill()
            raise
    if peer.returncode:
        raise RuntimeError(f"{PEER.name} ended with code {peer.returncode} in {arguments.peer}; see its message above.")
    return ours, torch.load(folder / "theirs.pt")


def with_scores(
    trials: list[dict[str, Any]], loaded: LoadedModel, examples: Mapping[str, Example], metric: str
) -> list[dict[str, Any]]:
    """Trials with the text of their answers and what it scores."""
    texts = [loaded.tokenizer.decode(trial["answer_ids"], skip_special_tokens=True) for trial in trials]
    scores = [
        metrics.score_answer(metric, text, examples[trial["example"]])
        for trial, text in zip(trials, texts, strict=True)
    ]
    found = zip(trials, texts, scores, strict=True)
    return [{**trial, "output": text, "score": score} for trial, text, score in found]


def cells_of(budgets: list[int], ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The record's part of every pair."""

    def of(trials: list[dict[str, Any]], key: str) -> dict[str, dict[str, Any]]:
        return {trial["example"]: trial for trial in trials if trial["contender"] == key}

    dense_bytes = {name: trial["held_bytes"] for name, trial in of(theirs, FULL.key).items()}
    for contender in contenders(budgets):
        yield cell_of(contender, of(ours, contender.key), of(theirs, contender.key), dense_bytes)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/kvpress_side_by_side", description=__doc__.splitlines()[0])
    parser.add_argument("--peer", default=".venv-kvpress/bin/python", help="the Python that has kvpress")
    parser.add_argument("--task", default="ruler_niah_single_2_pydoc")
    parser.add_argument("--tokens", type=int, default=1024, help="of prompt and answer")
    parser.add_argument("--examples", type=int, default=20)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 128], metavar="ROWS")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of either side")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers behind the tables")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    threads = use_threads(arguments.threads)
    # float32 on both sides, so that a difference is one of the rule and not of rounding.
    loaded = load_model(SMOLLM2_NAME, dtype="float32")
    task, encoder = make_task(arguments.task, {}), PromptEncoder(loaded.tokenizer)
    examples = {e.example_id: e for e in examples_of(task, encoder, arguments.tokens, arguments.examples)}
    prompts = {name: encoder.encode(example, query_aware=False) for name, example in examples.items()}
    with tempfile.TemporaryDirectory() as folder:
        ours, peer = both_halves(loaded, prompts, arguments, Path(folder))
    scored = (with_scores(trials, loaded, examples, task.metric) for trials in (ours, peer["trials"]))
    cells = list(cells_of(arguments.budgets, *scored))
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "model": loaded.name, "dtype": "float32",
        "device": platform.machine(), "threads": threads, "torch": str(torch.__version__),
        "transformers": transformers.__version__, "python": platform.python_version(), "peer": peer["environment"],
    }  # fmt: skip
    record = {
        "environment": environment,
        "task": arguments.task,
        "length_tokens": arguments.tokens,
        "context_tokens": {name: prompt.segment_ends[0] for name, prompt in prompts.items()},
        "max_new_tokens": MAX_NEW_TOKENS,
        "cells": cells,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record) + "\n")
    print("\n".join(report_lines(cells)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
