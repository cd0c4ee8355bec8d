"""A byte model retrofitted to dynamic memory compression, small enough to be trained anywhere and to ship.

The teacher is an ordinary Llama of bytes, trained on the help topics of the running Python. Its retrofit goes on from
there with relaxed decisions and a compression loss (script_lib/dmc_training.py); for comparison the teacher itself goes
on for as many steps on the same windows. What is told of the retrofit is measured through `DMCCache`, on text that
neither was trained on, from the saved weights in bfloat16.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import platform
import shlex
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers
from script_lib.dmc_training import (
    Recipe,
    Relaxed,
    byte_texts,
    evaluate_cache,
    evaluate_plain,
    make_model,
    train,
)
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.utils import logging as transformers_logging

CARD = "README.md"


class Clock:
    """Seconds of this process on its core, whatever else the machine does."""

    def __init__(self) -> None:
        self.began = time.process_time()

    def say(self, line: str) -> None:
        print(f"{time.process_time() - self.began:6.0f} s  {line}", flush=True)

    def seconds(self) -> float:
        return round(time.process_time() - self.began, 1)


def save_retrofit(model: LlamaForCausalLM, recipe: Recipe, folder: Path) -> str:
    """Write weights in bfloat16 and a config that declares the training; return the digest of the weights."""
    config: Any = model.config
    config.kvpolicy = {
        "kind": "dmc",
        "channel": recipe.channel,
        "ratio": recipe.ratio,
        "offset": recipe.offset,
        "window": None,
    }
    copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def load_retrofit(folder: Path) -> LlamaForCausalLM:
    """The saved weights, run in fp32."""
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def run(recipe: Recipe, folder: Path, texts: tuple[Tensor, Tensor], clock: Clock) -> dict[str, Any]:
    """Train, save and measure; return what was found."""
    data, test = texts
    teacher = make_model(recipe)
    train(
        teacher, data, recipe, steps=recipe.teacher_steps, peak=recipe.teacher_rate, seed=recipe.seed + 1, say=clock.say
    )
    found: dict[str, Any] = {"teacher_nats": evaluate_plain(teacher, test, recipe)}
    clock.say(f"teacher: {found['teacher_nats']:.4f} nats a byte on held-out text")
    further = {"steps": recipe.retrofit_steps, "peak": recipe.retrofit_rate, "seed": recipe.seed + 2, "say": clock.say}
    retrofit = copy.deepcopy(teacher)
    train(retrofit, data, recipe, relaxed=Relaxed(retrofit, recipe), **further)
    found["training_cpu_s"] = clock.seconds()
    found["weights_sha256"] = save_retrofit(retrofit, recipe, folder)
    nats, ratio = evaluate_cache(load_retrofit(folder), test, recipe)
    found |= {"retrofit_nats": nats, "tokens_per_row": ratio}
    clock.say(f"retrofit: {nats:.4f} nats a byte at {ratio:.3f} tokens a row")
    train(teacher, data, recipe, **further)
    found["further_teacher_nats"] = evaluate_plain(teacher, test, recipe)
    found["loss_gap_nats"] = nats - found["further_teacher_nats"]
    found["parameters"] = sum(weight.numel() for weight in retrofit.parameters())
    clock.say(f"teacher, trained on: {found['further_teacher_nats']:.4f}; gap {found['loss_gap_nats']:.4f}")
    return found


def card(found: dict[str, Any], recipe: Recipe, command: str, environment: dict[str, Any]) -> str:
    """What somebody who finds the weights must know."""
    return f"""# dmc-toy

A Llama of bytes with {found["parameters"]:,} parameters ({recipe.layers} layers, {recipe.query_heads} query and \
{recipe.kv_heads} KV heads),
retrofitted to dynamic memory compression: channel {recipe.channel} of every key and query decides which tokens become
one row. It is a test object and an example, not a language model. A token id is a byte of
UTF-8; there is no tokenizer.

Run it with `hf_kvpolicy.DMCCache`, and with nothing else: without it the deciding channels are read as keys.

| | |
|---|---|
| held-out loss through `DMCCache` | {found["retrofit_nats"]:.4f} nats a byte |
| tokens a stored row | {found["tokens_per_row"]:.3f} (trained for {recipe.ratio}) |
| the teacher, trained on for as many steps | {found["further_teacher_nats"]:.4f} nats a byte; the gap is \
{found["loss_gap_nats"]:.4f} |
| the teacher before the retrofit | {found["teacher_nats"]:.4f} nats a byte |
| teacher and retrofit took | {found["training_cpu_s"]:.0f} s of one core |
| `model.safetensors` | SHA-256 `{found["weights_sha256"]}` |
| command | `{command}` |
| made with | Python {environment["python"]}, torch {environment["torch"]}, \
transformers {environment["transformers"]} |

Text: the help topics of that Python (`pydoc_data.topics`, PSF-2.0), the last tenth held out, in windows of
{recipe.tokens} bytes. Weights: Apache-2.0, as the library.
"""


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    usual = Recipe()
    parser = argparse.ArgumentParser(prog="scripts/train_dmc", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, config and card")
    parser.add_argument("--record", type=Path, help="file for the numbers and all they depend on (JSON)")
    parser.add_argument("--teacher-steps", type=int, default=usual.teacher_steps)
    parser.add_argument("--retrofit-steps", type=int, default=usual.retrofit_steps)
    parser.add_argument("--ratio", type=float, default=usual.ratio, help="tokens a row to train for")
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--threads", type=int, default=1)
    found = parser.parse_args(arguments)
    if min(found.teacher_steps, found.retrofit_steps) < 1 or found.ratio < 1:
        parser.error("steps are whole numbers from 1, and a ratio is at least 1.")
    return found


def main(given: list[str] | None = None) -> int:
    arguments = parse_arguments(given)
    torch.set_num_threads(arguments.threads)
    transformers_logging.disable_progress_bar()
    recipe = Recipe(
        teacher_steps=arguments.teacher_steps,
        retrofit_steps=arguments.retrofit_steps,
        ratio=arguments.ratio,
        seed=arguments.seed,
    )
    texts = byte_texts()
    environment = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"), "device": "cpu", "threads": arguments.threads,
        "torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version(),
        "text_sha256": hashlib.sha256(bytes(torch.cat(texts).tolist())).hexdigest(),
    }  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    found = run(recipe, arguments.out, texts, Clock())
    asked = sys.argv[1:] if given is None else given
    command = shlex.join(["scripts/train_dmc", *asked])
    (arguments.out / CARD).write_text(card(found, recipe, command, environment), encoding="utf-8")
    if arguments.record is not None:
        record = {"environment": environment, "command": command, "recipe": asdict(recipe), "results": found}
        arguments.record.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    ratio, gap = found["tokens_per_row"], found["loss_gap_nats"]
    print(f"{ratio:.3f} tokens a row (asked {recipe.ratio}), {gap:+.4f} nats a byte over the teacher trained as long")
    return 0


if __name__ == "__main__":
    sys.exit(main())
