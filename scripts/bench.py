"""Time, bytes and peak memory of policies against transformers' own cache, with targets.

A script to read, not a test: times on a shared machine vary. docs/benchmarks.md tells how to read them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from bench_lib.answer import answer_measures
from bench_lib.curve import curve_measures
from bench_lib.device import DeviceBench
from bench_lib.memory import byte_measures, child_report, peak_measures
from bench_lib.merged import merged_byte_measures
from bench_lib.models import EVERY_POLICY, POLICIES, batch_ids, stock_twin
from bench_lib.quantized import quantized_measures
from bench_lib.ragged import ragged_measures
from bench_lib.report import Measure, environment, print_report, write_json
from bench_lib.shapes import SHAPES, random_model
from bench_lib.timing import Case, decode_measures, prefill_measures, unbudgeted_measures
from bench_lib.transient import transient_measure
from script_lib.loading import DTYPES, load_model, load_tokenizer, resolve_model, use_threads
from script_lib.prompts import filler_ids

PEAK_POLICY = "snapkv"
PEAK_ROWS = 512
TRANSIENT_TOKENS = (4096, 8192)
# Parts that need no model from anywhere.
OFFLINE = ("ragged", "answer", "quantized", "merged")
PARTS = ("decode", "unbudgeted", "prefill", "bytes", "peak", "curve", *OFFLINE, "transient")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    parser.add_argument("--model", help="a hub name or a folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rows", type=int, nargs="+", default=[128, 512], help="rows the policies hold")
    parser.add_argument("--rounds", type=int, help="interleaved rounds of a decode measure (default: 30)")
    parser.add_argument(
        "--policies", nargs="+", choices=EVERY_POLICY, default=list(EVERY_POLICY), help="of decode and prefill"
    )
    parser.add_argument("--prefill-rounds", type=int, default=5)
    parser.add_argument("--curve-steps", type=int, default=2000, help="decode steps of the time curve, tiny model")
    parser.add_argument("--quick", action="store_true", help="batch 1, context 1024, 128 rows, few rounds")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32, or the shape's")
    parser.add_argument(
        "--shape", choices=SHAPES, help="instead of all parts: a model of this shape with random weights, no download"
    )
    parser.add_argument("--memory-gib", type=float, help="with --shape: memory to plan with (default: the device's)")
    parser.add_argument("--time-limit", type=float, default=420, help="with --shape: seconds to plan with")
    parser.add_argument("--threads", type=int, help="torch threads (default: one a core)")
    parser.add_argument("--out", type=Path, help="write the results, raw ratios included, to this JSON file")
    parser.add_argument("--child", choices=("full", *POLICIES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.batches, arguments.contexts, arguments.rows = [1], [1024], [128]
        arguments.rounds, arguments.prefill_rounds, arguments.curve_steps = arguments.rounds or 10, 3, 500
    shape = SHAPES.get(arguments.shape)
    arguments.rounds = arguments.rounds or (30 if shape is None else shape.rounds)
    arguments.dtype = arguments.dtype or ("float32" if shape is None else shape.dtype)
    return arguments


def note(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def timed_parts(arguments: argparse.Namespace, model: Any, stock: Any, filler: list[int]) -> Iterator[Measure]:
    cases = [
        Case(batch, context, rows)
        for batch in arguments.batches
        for context in arguments.contexts
        for rows in arguments.rows
    ]
    if "bytes" in arguments.parts:
        note("bytes")
        context = min(arguments.contexts)
        for batch in arguments.batches:
            for rows in arguments.rows:
                yield from byte_measures(model, filler, batch, context, rows)
                yield from merged_byte_measures(model, batch_ids(filler, batch, context, model.device), rows)
    if "prefill" in arguments.parts:
        # Batch 1 at the longest context: larger batches take minutes a round and compare the same work.
        case = Case(1, max(arguments.contexts), max(arguments.rows))
        note(f"prefill: {case}, {arguments.prefill_rounds} rounds")
        yield from prefill_measures(model, stock, filler, case, arguments.prefill_rounds, arguments.policies)
    if "decode" in arguments.parts:
        for number, case in enumerate(cases, start=1):
            note(f"decode {number}/{len(cases)}: {case}, {arguments.rounds} rounds")
            yield from decode_measures(model, stock, filler, case, arguments.rounds, arguments.policies)
    if "unbudgeted" in arguments.parts:
        for batch in arguments.batches:
            for context in arguments.contexts:
                note(f"unbudgeted: batch {batch}, context {context}, {arguments.rounds} rounds")
                yield from unbudgeted_measures(model, filler, batch, context, arguments.rounds)


def child_arguments(arguments: argparse.Namespace, name: str) -> list[str]:
    passed = ["--model", name, "--device", arguments.device, "--dtype", arguments.dtype]
    return passed + (["--threads", str(arguments.threads)] if arguments.threads else [])


def shape_measures(arguments: argparse.Namespace) -> list[Measure]:
    """The measures of `--shape`, written as they come: a run that is cut short is not lost."""
    shape, memory_gib = SHAPES[arguments.shape], arguments.memory_gib
    note(f"model: {shape.name}, random weights in {arguments.dtype} on {arguments.device}")
    bench = DeviceBench(
        shape,
        random_model(shape, arguments.device, arguments.dtype),
        rounds=arguments.rounds,
        memory_bytes=None if memory_gib is None else int(memory_gib * 2**30),
        time_limit_s=arguments.time_limit,
        note=note,
    )
    measures = []
    with torch.inference_mode():
        for measure in bench.measures():
            note(f"{measure.group}: {measure.name}: {measure.shown}")
            measures.append(measure)
            if arguments.out:
                write_json(arguments.out, environment(shape.name, arguments.device, arguments.dtype), measures)
    return measures


def main() -> int:
    arguments = parse_arguments()
    use_threads(arguments.threads)
    if arguments.shape:
        return report(arguments, arguments.shape, shape_measures(arguments))
    measures: list[Measure] = []
    if "ragged" in arguments.parts:
        note("ragged: attention alone, no model")
        with torch.inference_mode():
            measures += ragged_measures(arguments.device, DTYPES[arguments.dtype], arguments.batches, arguments.rounds)
    if "answer" in arguments.parts:
        note("answer: rows dropped in blocks, a random model of eight layers")
        with torch.inference_mode():
            measures += answer_measures(arguments.device, DTYPES[arguments.dtype], arguments.batches, arguments.rounds)
    if "quantized" in arguments.parts:
        note("quantized: rows in int8 and int4, a random model of eight layers")
        with torch.inference_mode():
            measures += quantized_measures(
                arguments.device, DTYPES[arguments.dtype], arguments.batches, arguments.rounds
            )
    if "merged" in arguments.parts:
        note("merged: bytes of layer pairs, a random model of the shape tiny")
        tiny = SHAPES["tiny"]
        model = random_model(tiny, arguments.device, arguments.dtype)
        ids = torch.randint(3, 256, (2, min(tiny.contexts)), generator=torch.Generator().manual_seed(0))
        with torch.inference_mode():
            measures += merged_byte_measures(model, ids.to(arguments.device), min(tiny.budgets))
    if set(arguments.parts) <= set(OFFLINE):
        return report(arguments, "", measures)
    name = resolve_model(arguments.model)
    tokenizer = load_tokenizer(name)
    # The peak is always taken at 4096 tokens: a shorter prompt's cache does not show in a process's peak.
    filler = filler_ids(tokenizer, max(4096, *arguments.contexts))
    if arguments.child:
        policy = None if arguments.child == "full" else arguments.child
        model = load_model(name, arguments.device, arguments.dtype)
        with torch.inference_mode():
            print(json.dumps(child_report(model, filler, policy, 4096, PEAK_ROWS)))
        return 0
    if "peak" in arguments.parts:
        note("peak: two prefills in processes of their own")
        measures += peak_measures(child_arguments(arguments, name), PEAK_POLICY, 4096, PEAK_ROWS)
    with torch.inference_mode():
        if "curve" in arguments.parts:
            note(f"curve: {arguments.curve_steps} decode steps of a tiny model, all policies side by side")
            measures += curve_measures(arguments.device, arguments.curve_steps)
        if set(arguments.parts) & {"decode", "unbudgeted", "prefill", "bytes", "transient"}:
            model = load_model(name, arguments.device, arguments.dtype)
            if "transient" in arguments.parts:
                note("transient: one layer's evidence over two lengths")
                measures.append(transient_measure(model, *TRANSIENT_TOKENS))
            measures += timed_parts(arguments, model, stock_twin(model), filler)
    return report(arguments, name, measures)


def report(arguments: argparse.Namespace, name: str, measures: list[Measure]) -> int:
    facts = environment(name, arguments.device, arguments.dtype)
    print_report(facts, measures)
    if arguments.out:
        write_json(arguments.out, facts, measures)
    return 0


if __name__ == "__main__":
    sys.exit(main())
