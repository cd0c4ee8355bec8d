"""Wall time of a sweep that runs each dense prefill once: over that of its parts, and under that of one run a cell.

The parts of an example: one prefill with `DynamicCache`, and for every cell its own selection (budgets share nothing),
the likelihood of the gold answer and the greedy answer. What a sweep takes beyond them is the harness: keeping the
prompt for replay, measuring rows and bytes, the full cache's own distribution, records.

All three run on every example, in an order that rotates; ratios are taken within an example. CPU time of the process is
taken beside wall time: with one thread it is what wall time would be on an idle machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from bench_lib.report import Measure, environment, print_report, write_json
from script_lib.loading import use_threads
from transformers import DynamicCache

from hf_kvpolicy.errors import KVPolicyError
from hf_kvpolicy.eval import generation
from hf_kvpolicy.eval.cells import Cell, cells_at
from hf_kvpolicy.eval.engine import EngineBuilder
from hf_kvpolicy.eval.model_loading import SMOLLM2_NAME, LoadedModel, load_model
from hf_kvpolicy.eval.prompting import EncodedPrompt
from hf_kvpolicy.eval.run_directory import RunDirectory
from hf_kvpolicy.eval.runner import SweepWorker
from hf_kvpolicy.eval.sweep import parse_sweep
from hf_kvpolicy.eval.tasks.registry import make_task
from hf_kvpolicy.replay import CapturedPrompt, can_replay, capture_prompt, replay_prompt

TARGET = 1.15
POLICIES = ["streaming_llm", "random", "snapkv", "pyramidkv", "adakv", "h2o"]


class Seconds(NamedTuple):
    """Time by two clocks."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Seconds:
        """What both clocks show."""
        return cls(time.perf_counter(), time.process_time())

    def plus(self, begin: Seconds, end: Seconds) -> Seconds:
        """This, and the time between two moments."""
        return Seconds(self.wall + end.wall - begin.wall, self.cpu + end.cpu - begin.cpu)


NONE = Seconds(0.0, 0.0)


class Quiet:
    """Hears nothing but failures, after which a time means nothing."""

    def scored(self, label: str, score: float) -> None:
        """A cell answered."""

    def noted(self, note: str) -> None:
        """Something is to be known of a task point."""

    def failed(self, label: str, reason: str) -> None:
        """A cell failed."""
        raise SystemExit(f"error: {label}: {reason}. Leave the policy out with --policies.")


class Parts:
    """The work of an example's cells without the harness."""

    def __init__(self, loaded: LoadedModel, cells: list[Cell]) -> None:
        self._model, self._cells = loaded.model, cells
        self._build = EngineBuilder(loaded.model, loaded.tokenizer)
        self._stop_ids = generation.end_of_text_ids(loaded.model, loaded.tokenizer)

    def seconds(self, encoded: EncodedPrompt, captured: CapturedPrompt) -> dict[str, Seconds]:
        """One prefill, and the sums over cells of selecting and of decoding."""
        begin = Seconds.now()
        generation.prefill(self._model, encoded.segments, DynamicCache(config=self._model.config))
        found = {"prefill": NONE.plus(begin, Seconds.now()), "selection": NONE, "decode": NONE}
        for cell in self._cells:
            cache = self._build(cell)
            if not can_replay(cache):
                raise SystemExit(f"error: {cell.policy} runs its own prefill. Leave it out with --policies.")
            own = replace(captured, evidence=type(captured.evidence)())
            begin = Seconds.now()
            replay_prompt(cache, self._model, own)
            selected = Seconds.now()
            prefilled = generation.Prefilled(cache=cache, next_logits=captured.next_logits_BV[0], seconds=0.0)
            generation.score_answer(self._model, generation.fork(prefilled), encoded.answer_ids)
            generation.greedy_decode(self._model, prefilled, cell.max_new_tokens, self._stop_ids)
            found["selection"] = found["selection"].plus(begin, selected)
            found["decode"] = found["decode"].plus(selected, Seconds.now())
        return found


def rounds_of(loaded: LoadedModel, document: Mapping[str, Any], folder: Path) -> list[dict[str, Seconds]]:
    """Seconds of every example but the first, with which everything warms up."""
    workers = {
        name: SweepWorker(
            parse_sweep({**document, "share_prefill": share}),
            loaded,
            RunDirectory(folder / name),
            EngineBuilder(loaded.model, loaded.tokenizer),
        )
        for name, share in (("shared", True), ("run a cell", False))
    }
    shared = workers["shared"]
    point = shared.points[0]
    examples = make_task(point.task.name, point.task.params).examples(point.request, shared.encoder)
    parts = Parts(loaded, list(cells_at(shared.config, point)))
    for worker in workers.values():
        worker.run(0, len(examples), Quiet())  # past the last: builds the examples
    shared.run(0, 0, Quiet())
    found = []
    for number, example in enumerate(examples[1:], start=1):
        encoded = shared.encoded(example, query_aware=True)
        seconds: dict[str, Seconds] = {}
        ways = [*workers, "parts"]
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            if way == "parts":
                seconds |= parts.seconds(encoded, capture(loaded, encoded))
            else:
                seconds[way] = timed(workers[way], number)
        shown = ", ".join(f"{name} {value.wall:.1f} s ({value.cpu:.1f} of CPU)" for name, value in seconds.items())
        print(f"example {number}: {shown}", file=sys.stderr, flush=True)
        found.append(seconds)
    return found


def timed(worker: SweepWorker, number: int) -> Seconds:
    """Seconds that a worker takes for an example."""
    begin = Seconds.now()
    worker.run(0, number, Quiet())
    return NONE.plus(begin, Seconds.now())


def capture(loaded: LoadedModel, encoded: EncodedPrompt) -> CapturedPrompt:
    """What selections are replayed from; making it is no part of anything."""
    return capture_prompt(loaded.model, torch.tensor([encoded.token_ids]))


def measures_of(rounds: list[dict[str, Seconds]], case: str) -> list[Measure]:
    """The two ratios by either clock, with the seconds behind them."""
    found = []
    for clock, target in (("wall", TARGET), ("cpu", None)):
        taken = {name: [getattr(seconds[name], clock) for seconds in rounds] for name in rounds[0]}
        parts = [sum(each) for each in zip(taken["prefill"], taken["selection"], taken["decode"], strict=True)]
        above, gain = ratios(taken["shared"], parts), ratios(taken["run a cell"], taken["shared"])
        details = {name: taken[name] for name in ("shared", "prefill", "selection", "decode")}
        found += [
            Measure("shared/parts", f"{clock}, {case}", median(above), "<=", target, {"ratios": above, **details}),
            Measure(
                "run a cell/shared",
                f"{clock}, {case}",
                median(gain),
                ">=",
                None,
                {"ratios": gain, "run a cell": taken["run a cell"]},
            ),
        ]
    return found


def ratios(over: list[float], under: list[float]) -> list[float]:
    """One an example."""
    return [a / b for a, b in zip(over, under, strict=True)]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/shared_prefill", description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=SMOLLM2_NAME, help="a folder or a hub name")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--length", type=int, default=1024, help="tokens of a prompt and its answer")
    parser.add_argument("--examples", type=int, default=3, help="examples that are timed; one more warms up")
    parser.add_argument("--policies", nargs="+", default=POLICIES)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 128], metavar="ROWS")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--out", type=Path, help="JSON file for the seconds behind the ratios")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    threads = use_threads(arguments.threads)
    task = {"name": "needle_single_pydoc", "lengths_tokens": [arguments.length], "depths": [0.5]}
    document = {
        "model": {"name": arguments.model, "dtype": arguments.dtype},
        "threads": threads,
        "max_new_tokens": 12,
        "include_random": False,
        "budgets": arguments.budgets,
        "tasks": [{**task, "num_examples": arguments.examples + 1}],
        "policies": arguments.policies,
    }
    try:
        loaded = load_model(arguments.model, dtype=arguments.dtype)
        with tempfile.TemporaryDirectory() as folder:
            rounds = rounds_of(loaded, document, Path(folder))
    except KVPolicyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    cells = 1 + len(arguments.policies) * len(arguments.budgets)
    measures = measures_of(rounds, f"{cells} cells, {arguments.length} tokens")
    facts = {**environment(arguments.model, "cpu", arguments.dtype), "sweep": document}
    if arguments.out:
        write_json(arguments.out, facts, measures)
    print_report({key: value for key, value in facts.items() if key != "sweep"}, measures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
