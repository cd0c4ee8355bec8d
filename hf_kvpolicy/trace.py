"""Drawing what a policy does: which positions it keeps, step by step, on a tiny random model (nothing is loaded)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .compat import cache_argument
from .config import make_cache, policy_options
from .registry import example_training, needs_training, policy_class

__all__ = ["Trace", "TraceRow", "blocks", "describe", "draw", "headline", "paper", "trace"]

_KEPT, _DROPPED, _UNSEEN = "█", "·", " "


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """What one layer and head holds after so many tokens."""

    tokens: int
    positions: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A policy's run on a tiny model."""

    # What each head of the drawn layer holds after the prompt and after each token, [S][steps].
    heads: tuple[tuple[TraceRow, ...], ...]
    # Rows of every layer and head after the prompt, [L][S].
    owner_rows: tuple[tuple[int, ...], ...]
    # What the policy was given: a drawing is smaller than the defaults are made for.
    options: Mapping[str, Any]


def headline(policy: str) -> str:
    """Return the first line of a policy file's documentation."""
    document = inspect.getdoc(inspect.getmodule(policy_class(policy))) or ""
    return document.splitlines()[0] if document else ""


def paper(policy: str) -> str:
    """Return the identifier of the paper that a policy file cites first, such as 'arXiv 2404.14469', or ''."""
    document = inspect.getdoc(inspect.getmodule(policy_class(policy))) or ""
    # A docstring may break the line within it.
    cited = re.search(r"arXiv\s+(\d{4}\.\d{4,5})", document)
    return f"arXiv {cited[1]}" if cited else ""


def describe(policy: str) -> str:
    """Return a policy's documentation (paper, equations, deviations) and its options with their defaults."""
    cls = policy_class(policy)
    document = inspect.getdoc(inspect.getmodule(cls)) or ""
    parameters = inspect.signature(cls).parameters
    lines = [document, "", f"{cls.__name__}(model, ...)"]
    for name in policy_options(policy):
        default = parameters[name].default
        lines.append(f"  {name} = {'(required)' if default is inspect.Parameter.empty else repr(default)}")
    return "\n".join(lines)


def trace(
    policy: str, *, budget: int, prompt_tokens: int, decode_tokens: int, options: Mapping[str, Any], layer: int = 0
) -> Trace:
    """Run a policy on a tiny random Llama and note what is held after the prompt and after each token.

    Raises:
        KVPolicyError: the options do not fit the policy.
    """
    model = _tiny_model(policy)
    given = dict(options)
    if "budget" in policy_options(policy):
        given.setdefault("budget", budget)
    for newest in {"window", "recent"} & set(policy_options(policy)):
        given.setdefault(newest, max(1, budget // 3))
    if "profile" in policy_options(policy):
        given.setdefault("profile", "uniform")  # nothing was measured on random weights
    cache = make_cache(policy, model, **given)
    ids = torch.randint(1, 60, (1, prompt_tokens + decode_tokens), generator=torch.Generator().manual_seed(0))
    rows: list[list[TraceRow]] = [[] for _ in range(cache.geometry.num_kv_heads)]
    owner_rows: tuple[tuple[int, ...], ...] = ()
    chunks = [ids[:, :prompt_tokens], *(ids[:, i : i + 1] for i in range(prompt_tokens, ids.shape[1]))]
    with torch.inference_mode():
        for chunk in chunks:
            model(chunk, **{cache_argument(): cache}, use_cache=True, logits_to_keep=1)
            if not owner_rows:
                owner_rows = tuple(tuple(cache.stored_rows(i)[0].tolist()) for i in cache.policy_layers)
            for head, tokens in enumerate(cache.positions(layer)[: len(rows)]):
                rows[head].append(TraceRow(tokens=cache.get_seq_length(), positions=tuple(tokens.tolist())))
    return Trace(heads=tuple(tuple(head) for head in rows), owner_rows=owner_rows, options=given)


def draw(run: Trace) -> str:
    """Draw a trace as text: a line a step, a column a token position, one block per KV head; then all owners' rows."""
    total = run.heads[0][-1].tokens
    given = ", ".join(f"{name}={value!r}" for name, value in sorted(run.options.items()))
    lines = [f"\ndrawn with {given}" if given else "\ndrawn with the defaults"]
    for title, rows in blocks(run):
        lines.append(f"\n{title}; {_KEPT} kept")
        for row in rows:
            kept = set(row.positions)
            cells = (_KEPT if p in kept else _DROPPED if p < row.tokens else _UNSEEN for p in range(total))
            lines.append(f"{row.tokens:>5} tokens  {''.join(cells)}  {len(kept)} rows")
    lines.append("\nrows of every layer and head after the prompt")
    lines += [f"layer {layer:>2}  {' '.join(f'{n:>5}' for n in rows)}" for layer, rows in enumerate(run.owner_rows)]
    return "\n".join(lines)


def blocks(run: Trace) -> list[tuple[str, Sequence[TraceRow]]]:
    """Return one titled block where all heads agree, else one a head."""
    heads = run.heads
    suffix = "of layer 0, random weights"
    if all(head == heads[0] for head in heads):
        return [(f"all KV heads {suffix}", heads[0])]
    return [(f"KV head {number} {suffix}", rows) for number, rows in enumerate(heads)]


def _tiny_model(policy: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
    )
    if needs_training(policy):
        config.kvpolicy = example_training(policy, config.num_hidden_layers)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()
