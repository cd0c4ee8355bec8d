"""One needle prompt, one cache after another: its answer, what it holds, and a picture of the rows it kept."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table
from script_lib.loading import DTYPES, load_model, load_tokenizer, resolve_model, synchronize, use_threads
from script_lib.picture import KeptMap, save_picture
from script_lib.prompts import NeedlePrompt, needle_prompt

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument

# What is compared, by the name it is shown under. The unit decides who shares one set of rows: by default each KV head
# keeps its own, with "layer" the heads of a layer agree.
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sliding_window": ("sliding_window", {}),
    "streaming_llm": ("streaming_llm", {}),
    "snapkv": ("snapkv", {}),
    "snapkv, unit=layer": ("snapkv", {"unit": "layer"}),
    "random": ("random", {}),
}
FULL = "full"
ANSWER_TOKENS = 16


@dataclass(frozen=True)
class Outcome:
    policy: str
    budget: int | None
    answer: str
    right: bool
    answer_nll: float
    kept_rows: float
    kv_bytes: int
    prefill_s: float
    decode_ms: float
    kept_share: np.ndarray[Any, np.dtype[np.float64]]


def new_cache(label: str, model: Any, budget: int | None) -> Any:
    policy, options = CONTENDERS.get(label, (label, {}))
    return kv.make_cache(policy, model, budget=budget, **options)


def forward(model: Any, ids: list[int], cache: Any) -> torch.Tensor:
    """Feed tokens and return the logits of the last one."""
    input_ids = torch.tensor([ids], device=model.device)
    logits = model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{cache_argument(): cache}).logits
    synchronize(model.device)
    return logits[0, -1].float()


def timed_prefill(model: Any, prompt: NeedlePrompt, cache: Any) -> tuple[torch.Tensor, float]:
    begin = time.perf_counter()
    logits = forward(model, prompt.input_ids, cache)
    return logits, time.perf_counter() - begin


def greedy_answer(model: Any, logits: torch.Tensor, cache: Any) -> tuple[list[int], float]:
    """The answer's tokens, and the median milliseconds of a decode step."""
    ids, times = [int(logits.argmax())], []
    for _ in range(ANSWER_TOKENS):
        begin = time.perf_counter()
        logits = forward(model, ids[-1:], cache)
        times.append((time.perf_counter() - begin) * 1e3)
        ids.append(int(logits.argmax()))
    return ids, statistics.median(times)


def gold_nll(model: Any, logits: torch.Tensor, gold_ids: list[int], cache: Any) -> float:
    """Mean negative log-likelihood of the right answer, fed token by token as a policy acts in decode."""
    losses = []
    for i, gold in enumerate(gold_ids):
        losses.append(-float(logits.log_softmax(-1)[gold]))
        if i + 1 < len(gold_ids):
            logits = forward(model, [gold], cache)
    return statistics.fmean(losses)


def kept_share(cache: Any, layers: int, length: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    share = np.zeros((layers, length))
    for layer in range(layers):
        heads = cache.positions(layer)
        for positions in heads:
            share[layer, positions.cpu().numpy()] += 1 / len(heads)
    return share


def run_cache(model: Any, tokenizer: Any, prompt: NeedlePrompt, policy: str, budget: int | None) -> Outcome:
    """Prefill once, then answer freely and feed the right answer to a fork."""
    layers = model.config.get_text_config().num_hidden_layers
    cache = new_cache(policy, model, budget)
    logits, prefill_s = timed_prefill(model, prompt, cache)
    rows = torch.stack([cache.stored_rows(layer).float().mean() for layer in range(layers)]).mean()
    share, held = kept_share(cache, layers, len(prompt.input_ids)), cache.ledger().measured_bytes
    nll = gold_nll(model, logits, prompt.gold_ids, cache.fork())
    ids, decode_ms = greedy_answer(model, logits, cache)
    answer = tokenizer.decode(ids, skip_special_tokens=True).strip().split("\n")[0]
    return Outcome(
        policy,
        budget,
        answer,
        prompt.value in answer,
        nll,
        float(rows),
        held,
        prefill_s,
        decode_ms,
        share,
    )


def result_table(outcomes: list[Outcome], prompt_length: int) -> Table:
    table = Table(title=f"One needle, {prompt_length} prompt tokens", title_justify="left")
    table.add_column("policy", no_wrap=True)
    for heading in ("budget", "rows kept", "KV MiB", "prefill s", "decode ms/token", "answer NLL"):
        table.add_column(heading, justify="right")
    table.add_column("right")
    table.add_column("answer", no_wrap=True, overflow="ellipsis", max_width=34)
    for o in outcomes:
        table.add_row(
            o.policy, "-" if o.budget is None else str(o.budget), f"{o.kept_rows:.0f}",
            f"{o.kv_bytes / 2**20:.1f}", f"{o.prefill_s:.2f}", f"{o.decode_ms:.1f}", f"{o.answer_nll:.2f}",
            "[green]yes[/]" if o.right else "[red]no[/]", o.answer.replace("[", r"\["),
            end_section=o is outcomes[-1] or o.budget != outcomes[outcomes.index(o) + 1].budget,
        )  # fmt: skip
    return table


def pictures(outcomes: list[Outcome], prompt: NeedlePrompt, folder: Path) -> Iterator[Path]:
    for budget in sorted({o.budget for o in outcomes if o.budget is not None}):
        maps = [
            KeptMap(f"{o.policy}: {o.kept_rows:.0f} rows a head, answer NLL {o.answer_nll:.2f}", o.kept_share)
            for o in outcomes
            if o.budget == budget
        ]
        heading = f"Rows kept of {len(prompt.input_ids)} prompt tokens, budget {budget} rows per KV head"
        path = folder / f"kept_rows_{budget}.png"
        save_picture(path, maps, prompt.needle_span, heading)
        yield path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--model", help="a hub name or a folder (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--budgets", type=int, nargs="+", default=[128, 512], metavar="ROWS")
    parser.add_argument("--tokens", type=int, default=2000, help="about how long the prompt is")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, help="torch threads (default: one a core)")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="where the pictures go")
    return parser.parse_args()


def run_all(model: Any, tokenizer: Any, prompt: NeedlePrompt, budgets: list[int], console: Console) -> list[Outcome]:
    cells: list[tuple[str, int | None]] = [(FULL, None), *((label, b) for b in budgets for label in CONTENDERS)]
    outcomes = []
    # A bar needs a terminal; a log gets one line a run instead.
    bar = Progress(
        *Progress.get_default_columns(), TimeElapsedColumn(), console=console, disable=not console.is_terminal
    )
    with bar as progress:
        task = progress.add_task("warming up", total=len(cells))
        forward(model, prompt.input_ids[:64], new_cache(FULL, model, None))
        for number, (policy, budget) in enumerate(cells, start=1):
            name, begin = policy if budget is None else f"{policy} {budget}", time.perf_counter()
            progress.update(task, description=name)
            outcomes.append(run_cache(model, tokenizer, prompt, policy, budget))
            progress.advance(task)
            if not console.is_terminal:
                seconds = time.perf_counter() - begin
                console.print(f"{number}/{len(cells)} {name}: {seconds:.0f} s", highlight=False, markup=False)
    return outcomes


def main() -> int:
    arguments = parse_arguments()
    notes = Console(stderr=True)
    threads = use_threads(arguments.threads)
    name = resolve_model(arguments.model)
    notes.print(f"model {name}, {arguments.device}, {arguments.dtype}, {threads} threads", highlight=False)
    model, tokenizer = load_model(name, arguments.device, arguments.dtype), load_tokenizer(name)
    prompt = needle_prompt(tokenizer, arguments.tokens)
    with torch.inference_mode():
        outcomes = run_all(model, tokenizer, prompt, arguments.budgets, notes)
    # A table is worth reading only in one piece, whatever the width of a pipe or log.
    Console(width=max(notes.width, 130)).print(result_table(outcomes, len(prompt.input_ids)))
    print(f"the right answer is {prompt.value}; NLL is per token of it, lower is better")
    print("Times are single runs and vary on a shared machine; scripts/bench measures them in interleaved rounds.")
    if not outcomes[0].right:
        print("The full cache misses the needle too, so this model cannot show a policy's loss. Try another.")
    for path in pictures(outcomes, prompt, arguments.out):
        print(f"picture: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
