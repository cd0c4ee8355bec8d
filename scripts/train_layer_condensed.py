"""Two byte-level toys trained alike, one of them with condensed layers: what each loses, and what its cache stores.

The text is that of CPython's own language reference, so nothing is downloaded. Both models see the same batches. Both
are judged on a part of the text that neither saw, through a cache of this library: the condensed one token by token
(what it is) and iterated (what running a prompt in passes makes of it). Models this small say nothing about the quality
of either design; they show that the path from training to generation holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from bench_lib.report import environment
from script_lib.condensed_training import iterated_logits, next_token_loss
from script_lib.loading import use_threads
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import hf_kvpolicy as kv
from hf_kvpolicy.compat import cache_argument
from hf_kvpolicy.errors import KVPolicyError
from hf_kvpolicy.eval.tasks.haystack import pydoc_prose

# Of the text, at its end, what is not trained on.
HELD_OUT = 0.1
BYTES = 256


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sizes and steps of both models."""

    layers: int = 6
    warmup_layers: int = 2
    forward_passes: int = 7
    backward_passes: int = 2
    hidden: int = 80
    heads: int = 4
    steps: int = 600
    batch: int = 8
    tokens: int = 128
    rate: float = 3e-3
    # Sequences of held-out text.
    judged: int = 16
    seed: int = 0


def text_bytes() -> Tensor:
    """The text, one byte an element."""
    return torch.tensor(list("\n".join(pydoc_prose().sentences).encode()), dtype=torch.long)


def make_model(plan: Plan, *, condensed: bool) -> Any:
    """An untrained model; both kinds begin with the same weights."""
    config = LlamaConfig(
        vocab_size=BYTES,
        hidden_size=plan.hidden,
        intermediate_size=plan.hidden * 12 // 5,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.heads,
        max_position_embeddings=4 * plan.tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    if condensed:
        config.kvpolicy = kv.LayerCondensedCache.checkpoint_entry(
            plan.layers,
            warmup_layers=plan.warmup_layers,
            forward_passes=plan.forward_passes,
            backward_passes=plan.backward_passes,
        )
    torch.manual_seed(plan.seed)
    return LlamaForCausalLM(config)


def train(model: Any, text: Tensor, plan: Plan, say: Callable[[str], None]) -> list[float]:
    """Train in place; returns the loss of every step, in nats a byte."""
    logits_of = ordinary_logits if getattr(model.config, "kvpolicy", None) is None else iterated_logits
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.1)
    warm = max(1, plan.steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _rate_share(step, warm, plan.steps))
    places = torch.Generator().manual_seed(plan.seed)
    losses = []
    model.train()
    for step in range(plan.steps):
        starts = torch.randint(0, len(text) - plan.tokens, (plan.batch, 1), generator=places)
        ids = text[starts + torch.arange(plan.tokens)]
        loss = next_token_loss(logits_of(model, ids), ids)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
        if step % 50 == 49:
            say(f"step {step + 1}: {sum(losses[-50:]) / 50:.3f}")
    model.eval()
    return losses


def ordinary_logits(model: Any, ids: Tensor) -> Tensor:
    """Logits of the model as transformers runs it."""
    logits: Tensor = model(ids, use_cache=False).logits
    return logits


def _rate_share(step: int, warm: int, steps: int) -> float:
    """Rise in a line, then fall in a line to a tenth."""
    return min((step + 1) / warm, 0.1 + 0.9 * (steps - step) / steps)


@torch.inference_mode()
def judge(
    model: Any, text: Tensor, plan: Plan, make_cache: Callable[[], kv.PolicyCache]
) -> tuple[float, kv.PolicyCache]:
    """The loss of text the model has not seen, prompts fed to a cache at once; and the cache afterwards."""
    step = (len(text) - plan.tokens) // plan.judged
    ids = text[(torch.arange(plan.judged) * step)[:, None] + torch.arange(plan.tokens)]
    cache = make_cache()
    logits = model(ids, **{cache_argument(): cache}, use_cache=True).logits
    cache.check_integrity()
    return float(next_token_loss(logits, ids)), cache


@torch.inference_mode()
def written(model: Any, cache: kv.PolicyCache, prompt: str, tokens: int) -> str:
    """What a model goes on with, greedily."""
    ids = torch.tensor([list(prompt.encode())])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, **{cache_argument(): cache}
    )
    return bytes(found[0].tolist()).decode(errors="replace")


def run(plan: Plan, say: Callable[[str], None]) -> dict[str, Any]:
    """Train and judge both models; returns every number."""
    text = text_bytes()
    border = int(len(text) * (1 - HELD_OUT))
    seen, unseen = text[:border], text[border:]
    found: dict[str, Any] = {"text": {"name": "pydoc", "sha256": pydoc_prose().sha256, "bytes": len(text)}}
    for name in ("ordinary", "condensed"):
        model = make_model(plan, condensed=name == "condensed")
        say(f"{name}: {sum(part.numel() for part in model.parameters()):,} parameters")
        begun = time.perf_counter()
        losses = train(model, seen, plan, say)
        seconds = time.perf_counter() - begun
        ways = _ways(model)
        judged = {way: judge(model, unseen, plan, make) for way, make in ways.items()}
        ledger = next(iter(judged.values()))[1].ledger()
        tail = losses[-max(1, len(losses) // 10) :]
        found[name] = {
            "parameters": sum(part.numel() for part in model.parameters()),
            "map": (getattr(model.config, "kvpolicy", None) or {"map": None})["map"],
            "seconds": seconds,
            "first_loss": losses[0],
            "train_loss": sum(tail) / len(tail),
            "unseen_loss": {way: loss for way, (loss, _) in judged.items()},
            "payload_bytes": ledger.payload_bytes,
            "measured_bytes": ledger.measured_bytes,
            "full_payload_bytes": ledger.full_payload_bytes,
            "answer": written(model, next(iter(ways.values()))(), "The following ", 60),
        }
    stored = [found[name]["payload_bytes"] for name in ("condensed", "ordinary")]
    found["stored_ratio"] = stored[0] / stored[1]
    return found


def _ways(model: Any) -> dict[str, Callable[[], kv.PolicyCache]]:
    """The caches that judge a model."""
    if getattr(model.config, "kvpolicy", None) is None:
        return {"full": lambda: kv.FullCache(model)}
    return {
        "sequential": lambda: kv.LayerCondensedCache(model, encoding="sequential"),
        "iterated": lambda: kv.LayerCondensedCache(model, encoding="iterated"),
    }


def table(found: dict[str, Any]) -> str:
    """Both models, a line each and way of encoding."""
    lines = [f"{'model':<10} {'encoding':<11} {'train':>7} {'unseen':>7}  {'K/V payload':>12}  seconds"]
    for name in ("ordinary", "condensed"):
        facts = found[name]
        lines += [
            f"{name:<10} {way:<11} {facts['train_loss']:7.3f} {loss:7.3f}  {facts['payload_bytes']:10,} B"
            f"  {facts['seconds']:7.0f}"
            for way, loss in facts["unseen_loss"].items()
        ]
    lines.append(
        f"loss in nats a byte; the condensed cache stores {found['stored_ratio']:.3f} of the ordinary one's bytes"
    )
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/train_layer_condensed", description=__doc__.splitlines()[0])
    for name, value in asdict(Plan()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help="default %(default)s")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--out", type=Path, help="JSON file for every number")
    return parser.parse_args()


def main() -> int:
    given = vars(parse_arguments())
    out, threads = given.pop("out"), use_threads(given.pop("threads"))
    plan = Plan(**given)
    try:
        found = run(plan, lambda line: print(line, file=sys.stderr, flush=True))
    except KVPolicyError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    facts = {**environment("toy", "cpu", "float32"), "threads": threads, "plan": asdict(plan), **found}
    if out is not None:
        out.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
