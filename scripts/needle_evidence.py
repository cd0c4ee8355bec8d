"""What scored policies keep of needle prompts, beside what eager attention says they must, and where the rows went."""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from script_lib.eager import LayerScores, attention_of_layers, kept_rows, layer_scores
from script_lib.loading import use_threads
from script_lib.needle_rows import (
    PARTS,
    Needle,
    agreement,
    budget_parts,
    find_needle,
    kept_mask,
    needle_rows,
    percentile,
)
from torch import Tensor
from transformers import AutoModelForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.eval.cells import task_points
from hf_kvpolicy.eval.generation import prefill, score_answer
from hf_kvpolicy.eval.model_loading import LoadedModel, load_model
from hf_kvpolicy.eval.prompting import PromptEncoder
from hf_kvpolicy.eval.sweep import load_sweep
from hf_kvpolicy.eval.tasks.base import Example
from hf_kvpolicy.eval.tasks.registry import make_task

# By the name it is shown under: a policy and its options.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "h2o": ("h2o", {}),
    "keyformer": ("keyformer", {}),
    "scissorhands": ("scissorhands", {}),
    "snapkv": ("snapkv", {}),
    "snapkv(unit=layer)": ("snapkv", {"unit": "layer"}),
}
# Not run, only chosen: the newest rows, and what H2O would keep if age were no advantage.
CHOSEN = ("sliding_window", "h2o by mean")


@dataclass(frozen=True)
class Case:
    """One prompt with what eager attention says about it; `attention_LHN` is the answer's."""

    example: Example
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...]
    needle: Needle
    scores: list[LayerScores]
    attention_LHN: Tensor


def examples_of(sweep: str, numbers: list[int]) -> list[Example]:
    """Some examples of the sweep's first task, as its cells saw them."""
    config = load_sweep(Path(sweep))
    point = next(task_points(config))
    encoder = PromptEncoder(load_model(config.model.name, dtype="float32").tokenizer)
    found = make_task(point.task.name, point.task.params).examples(point.request, encoder)
    return [found[number] for number in numbers]


@torch.no_grad()
def eager_case(model: Any, tokenizer: Any, example: Example) -> Case:
    """Feed prompt and answer to an unattached eager model, a layer's attention at a time."""
    encoder = PromptEncoder(tokenizer)
    encoded = encoder.encode(example)
    prompt = len(encoded.token_ids)
    kv_heads = model.config.num_key_value_heads
    scores: list[LayerScores] = []
    paid: list[Tensor] = []

    def receive(layer: int, attention_QTN: Tensor) -> None:
        scores.append(layer_scores(attention_QTN[:, :prompt, :prompt], layer, kv_heads))
        # The query before each answer token is the one that predicts it.
        answer_QTN = attention_QTN[:, prompt - 1 :, :prompt]
        paid.append(answer_QTN.sum(1).unflatten(0, (kv_heads, -1)).sum(1))

    fed = [*encoded.token_ids, *encoded.answer_ids[:-1]]
    with attention_of_layers(model, receive):
        model(input_ids=torch.tensor([fed]), use_cache=False, logits_to_keep=1)
    needle = find_needle(tokenizer, encoder.text(example), example.answers[0])
    return Case(example, encoded.token_ids, encoded.answer_ids, needle, scores, torch.stack(paid))


def measured(loaded: LoadedModel, case: Case, label: str, budget: int) -> dict[str, Any]:
    """Run one policy on the prompt and the right answer."""
    policy, options = CONTENDERS[label]
    tokens = len(case.prompt_ids)
    cache = kv.make_cache(policy, loaded.model, budget=budget, **options)
    prefilled = prefill(loaded.model, [case.prompt_ids], cache)
    mask_LHN = _held(cache, tokens)
    found = _described(mask_LHN, case)
    found["agreement"], found["agreement_worst_head"] = agreement(mask_LHN, _asked(case, label, budget))
    found["answer_nll"] = score_answer(loaded.model, prefilled, case.answer_ids).nll_per_token
    after = needle_rows(_held(cache, tokens), case.needle, case.attention_LHN)
    return {**found, "value_rows_after_answer": after["value_rows"]}


def _held(cache: Any, tokens: int) -> Tensor:
    return kept_mask([cache.positions(layer) for layer in cache.policy_layers], tokens)


def _asked(case: Case, label: str, budget: int) -> Tensor:
    """The rows that the rule keeps by eager attention."""
    return kept_mask([list(kept_rows(label, scores, budget)) for scores in case.scores], len(case.prompt_ids))


def _described(mask_LHN: Tensor, case: Case) -> dict[str, Any]:
    return {**needle_rows(mask_LHN, case.needle, case.attention_LHN), "budget_by_tenth": budget_parts(mask_LHN)}


def _percentiles(case: Case) -> dict[str, float]:
    """How the value's rows rank by each score, mean over layers."""
    by_name = {
        "sum of attention": [percentile(s.column_sums_HN, case.needle) for s in case.scores],
        "mean of attention": [percentile(s.column_sums_HN / _seen(s), case.needle) for s in case.scores],
        "sum of Gumbel-softmax": [percentile(s.gumbel_sums_HN, case.needle) for s in case.scores],
        "fewest low scores": [percentile(-s.low_counts_HN, case.needle) for s in case.scores],
        "votes of the last queries": [percentile(s.votes_HN, case.needle) for s in case.scores],
    }
    return {name: fmean(values) for name, values in by_name.items()}


def _seen(scores: LayerScores) -> Tensor:
    return torch.arange(scores.column_sums_HN.shape[1], 0, -1)


def cells_of(loaded: LoadedModel, case: Case, budgets: list[int]) -> Iterator[dict[str, Any]]:
    for budget in budgets:
        for label in CONTENDERS:
            yield {"policy": label, "budget": budget, **measured(loaded, case, label, budget)}
        for label in CHOSEN:
            yield {"policy": label, "budget": budget, **_described(_asked(case, label, budget), case)}


def record_of(loaded: LoadedModel, case: Case, budgets: list[int]) -> dict[str, Any]:
    where = {"sentence": list(case.needle.sentence), "value": list(case.needle.value)}
    cells = []
    for cell in cells_of(loaded, case, budgets):
        print(f"{case.example.example_id} {cell['policy']} @ {cell['budget']}", file=sys.stderr, flush=True)
        cells.append(cell)
    return {
        "id": case.example.example_id,
        **case.example.coordinates,
        "prompt_tokens": len(case.prompt_ids),
        "needle": where,
        "value_percentile": _percentiles(case),
        "cells": cells,
    }


LAYERS_A_COLUMN = 5
COLUMNS = {
    "agreement": "rows as eager asks",
    "agreement_worst_head": "worst head",
    "sentence_rows": "needle rows",
    "value_rows": "value rows",
    "heads_with_whole_value": "heads with the whole value",
    "value_attention": "value attention",
    "value_rows_after_answer": "value rows after the answer",
}


def summary_lines(records: list[dict[str, Any]]) -> list[str]:
    """Means over the prompts as tables in Markdown, a line a policy and budget; the last one ranks the value's rows."""
    by_cell: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for cell in record["cells"]:
            by_cell.setdefault(f"{cell['policy']} @ {cell['budget']}", []).append(cell)
    shares = {
        label: [_mean_text([cell.get(name) for cell in cells]) for name in COLUMNS] for label, cells in by_cell.items()
    }
    layers = {label: _means(cells, "value_rows_by_layer") for label, cells in by_cell.items()}
    grouped = {label: [fmean(part) for _, part in _groups(values)] for label, values in layers.items()}
    names = [f"layers {first}-{first + len(part) - 1}" for first, part in _groups(next(iter(layers.values())))]
    tenths = {label: _means(cells, "budget_by_tenth") for label, cells in by_cell.items()}
    lines = _table(["policy", *COLUMNS.values()], shares)
    lines += ["", *_table(["policy", *names], _texts(grouped))]
    lines += ["", *_table(["policy", *(f"{n}0%" for n in range(1, PARTS + 1))], _texts(tenths))]
    ranks = {name: [fmean(r["value_percentile"][name] for r in records)] for name in records[0]["value_percentile"]}
    return [*lines, "", *_table(["score", "rows below the value's"], _texts(ranks))]


def _means(cells: list[dict[str, Any]], name: str) -> list[float]:
    return [fmean(part) for part in zip(*(cell[name] for cell in cells), strict=True)]


def _groups(values: list[float]) -> list[tuple[int, list[float]]]:
    """Values of neighbouring layers, with the first layer's index."""
    return [(first, values[first : first + LAYERS_A_COLUMN]) for first in range(0, len(values), LAYERS_A_COLUMN)]


def _texts(rows: dict[str, list[float]]) -> dict[str, list[str]]:
    return {label: [f"{value:.2f}" for value in values] for label, values in rows.items()}


def _mean_text(values: list[float | None]) -> str:
    known = [value for value in values if value is not None]
    # Not rounded up to one: 0.9999 is not all of it.
    return f"{int(fmean(known) * 1000) / 1000:.3f}" if known else ""


def _table(columns: list[str], rows: dict[str, list[str]]) -> list[str]:
    cells = [columns, ["---"] * len(columns), *([label, *texts] for label, texts in rows.items())]
    return [f"| {' | '.join(row)} |" for row in cells]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/needle_evidence", description=__doc__)
    parser.add_argument("--sweep", default="needle_retention", help="a sweep file or the name of a shipped one")
    parser.add_argument("--examples", type=int, nargs="+", default=[0, 2, 4], help="which prompts of its first task")
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 256], metavar="ROWS")
    parser.add_argument("--threads", type=int, help="torch threads (default: one a core)")
    parser.add_argument("--out", type=Path, help="JSON file for the numbers behind the tables")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    threads = use_threads(arguments.threads)
    name = load_sweep(Path(arguments.sweep)).model.name
    # float32 on both sides, so that a difference is one of the rule and not of rounding.
    loaded = load_model(name, dtype="float32")
    eager = AutoModelForCausalLM.from_pretrained(loaded.source, dtype=torch.float32, attn_implementation="eager")
    records = []
    for example in examples_of(arguments.sweep, arguments.examples):
        case = eager_case(eager.eval(), loaded.tokenizer, example)
        records.append(record_of(loaded, case, arguments.budgets))
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "model": name, "dtype": "float32",
        "threads": threads, "torch": torch.__version__, "transformers": transformers.__version__,
        "python": platform.python_version(), "sweep": Path(arguments.sweep).stem,
    }  # fmt: skip
    if arguments.out:
        arguments.out.write_text(json.dumps({"environment": environment, "examples": records}) + "\n")
    print("\n".join(summary_lines(records)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
